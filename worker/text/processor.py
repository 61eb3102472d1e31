"""Text and chats to token ids, and back, for one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from worker.errors import InvalidRequest, ModelLoadError
from worker.model.files import TOKENIZER, ModelFiles, read_json
from worker.text.control_tokens import ControlTokens, Disguise
from worker.text.template import ChatTemplate

MAX_TEXT_BYTES = 1 << 20
MAX_MESSAGES = 4096
ROLES = ("system", "user", "assistant", "tool")
_PROBE = "a"


class TextProcessor:
    """Encodes, decodes and renders chats. Safe to use from several threads; encoding does not hold the interpreter.

    Text from outside never becomes a control token, whatever it spells: the string of a special token is encoded as
    the characters it has. Control tokens come from the model's own chat template (or from token ids) alone.

    Encoding takes time in proportion to the text, at most about 1.5 microseconds a byte whatever the text is, and no
    text longer than `max_text_bytes` is taken.
    """

    def __init__(
        self,
        tokenizer_json: str,
        *,
        template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        max_text_bytes: int = MAX_TEXT_BYTES,
    ) -> None:
        self.max_text_bytes = max_text_bytes
        self._parsing = _tokenizer(tokenizer_json)
        """Turns the strings of control tokens into them."""
        self._control = ControlTokens.among(self._parsing.get_added_tokens_decoder().items(), template or "")
        self._plain = _plain_tokenizer(tokenizer_json, self._control)
        """Knows no control tokens."""
        self._normalizer = _control_normalizer(self._parsing, self._control)
        self._before, self._after = _surroundings(self._parsing)
        self._template = None if template is None else ChatTemplate(template, special_tokens or {})

    @classmethod
    def from_files(cls, files: ModelFiles, *, max_text_bytes: int = MAX_TEXT_BYTES) -> TextProcessor:
        """The text side of a model. Raises ModelLoadError when its tokenizer or template cannot be used."""
        path = files.directory / TOKENIZER
        config_path = files.directory / "tokenizer_config.json"
        config = read_json(config_path) if config_path.is_file() else {}
        try:
            return cls(
                path.read_text(encoding="utf-8"),
                template=_template_source(files.directory, config),
                special_tokens=_special_tokens(config),
                max_text_bytes=max_text_bytes,
            )
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Token ids the tokenizer knows, added ones included; the model may have more rows than that."""
        return self._parsing.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can be used."""
        return self._template is not None

    @property
    def control_token_ids(self) -> frozenset[int]:
        """Ids that no text from outside is encoded to."""
        return self._control.ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the special tokens the model wants around every text if asked for."""
        self._check_size("text", len(_utf8("text", text)))
        ids = self._encode_plain("text", text)
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids the tokenizer does not know have none."""
        try:
            return self._parsing.decode(ids, skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError):
            raise InvalidRequest("token_ids", "holds something that is not a token id") from None

    def render_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Token ids of the prompt for the next answer to (role, content) messages.

        Raises InvalidRequest for "messages": no template, no messages, an unknown role, too much text, or what the
        template says against them.
        """
        template = self._checked(messages)
        self._refuse_lookalikes(template, messages)
        if not any(self._control.occurs_in(content) for _, content in messages):
            chat = [{"role": role, "content": content} for role, content in messages]
            return self._encode_rendered(template.render(chat))
        disguise = self._disguise(template, messages)
        chat = [{"role": role, "content": disguise.put_on(content)} for role, content in messages]
        ids: list[int] = []
        for piece, is_users in disguise.take_off(template.render(chat)):
            ids += self._encode_plain("messages", piece) if is_users else self._encode_rendered(piece)
        return ids

    def _checked(self, messages: Sequence[tuple[str, str]]) -> ChatTemplate:
        if self._template is None:
            raise InvalidRequest("messages", "the model has no chat template: send a prompt instead")
        if not messages:
            raise InvalidRequest("messages", "is empty")
        if len(messages) > MAX_MESSAGES:
            raise InvalidRequest("messages", f"has {len(messages)} messages, the limit is {MAX_MESSAGES}")
        for role, _ in messages:
            if role not in ROLES:
                raise InvalidRequest("messages", f"role {role[:32]!r} is not one of {', '.join(ROLES)}")
        self._check_size("messages", sum(len(_utf8("messages", content)) for _, content in messages))
        return self._template

    def _refuse_lookalikes(self, template: ChatTemplate, messages: Sequence[tuple[str, str]]) -> None:
        """Text that only the tokenizer's normalisation would turn into a control token's string has no stand-in."""
        if self._normalizer is None:
            return
        disguise = self._disguise(template, messages)
        for _, content in messages:
            if self._control.occurs_in(self._normalizer.normalize_str(disguise.put_on(content))):
                raise InvalidRequest("messages", "spell a special token in characters that are normalised to it")

    def _disguise(self, template: ChatTemplate, messages: Sequence[tuple[str, str]]) -> Disguise:
        return Disguise(self._control, (template.source, *(content for _, content in messages)))

    def _check_size(self, field: str, size: int) -> None:
        if size > self.max_text_bytes:
            raise InvalidRequest(field, f"is {size} bytes long, the limit is {self.max_text_bytes}")

    def _encode_rendered(self, text: str) -> list[int]:
        """What a template wrote: here control tokens' strings mean them."""
        if len(text) > 2 * self.max_text_bytes:
            raise InvalidRequest("messages", f"become {len(text)} characters, the limit is {2 * self.max_text_bytes}")
        return _ids(self._parsing, text)

    def _encode_plain(self, field: str, text: str) -> list[int]:
        ids = _ids(self._plain, text)
        if not self._control.ids.isdisjoint(ids):
            # Some vocabularies hold a control token's string as an ordinary word as well: spell it out.
            ids = [token_id for piece in self._spelled_out(text) for token_id in _ids(self._plain, piece)]
            if not self._control.ids.isdisjoint(ids):
                raise InvalidRequest(
                    field, "holds text that this model's tokenizer cannot keep apart from a special token"
                )
        return ids

    def _spelled_out(self, text: str) -> list[str]:
        """`text` in pieces, with every control token's string cut into its characters."""
        pieces, position = [], 0
        for match in self._control.pattern.finditer(text) if self._control.pattern else ():
            pieces += [text[position : match.start()], *match[0]]
            position = match.end()
        return [piece for piece in (*pieces, text[position:]) if piece]


def _tokenizer(tokenizer_json: str) -> Tokenizer:
    try:
        tokenizer: Tokenizer = Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises nothing more specific
        raise ModelLoadError(f"{TOKENIZER} cannot be used: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _plain_tokenizer(tokenizer_json: str, control: ControlTokens) -> Tokenizer:
    tokenizer = _tokenizer(tokenizer_json)
    added = tokenizer.get_added_tokens_decoder()
    # Only special tokens can be switched off, so all that steer are made special here.
    tokenizer.add_special_tokens([_as_special(added[token_id]) for token_id in control.ids])
    tokenizer.encode_special_tokens = True
    return tokenizer


def _control_normalizer(tokenizer: Tokenizer, control: ControlTokens) -> Any:
    """The tokenizer's normaliser, if control tokens are looked for behind it; None otherwise."""
    added = tokenizer.get_added_tokens_decoder()
    return tokenizer.normalizer if any(added[token_id].normalized for token_id in control.ids) else None


def _as_special(token: Any) -> Any:
    token.special = True
    return token


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    # A batch of one: unlike `encode`, it lets other threads run.
    return list(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)


def _surroundings(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids the tokenizer puts before and after every text."""
    ids = tokenizer.encode(_PROBE).ids
    bare = tokenizer.encode(_PROBE, add_special_tokens=False).ids
    start = next((i for i in range(len(ids) - len(bare) + 1) if ids[i : i + len(bare)] == bare), None)
    if start is None:
        raise ModelLoadError(f"{TOKENIZER} changes a text instead of adding to it")
    return ids[:start], ids[start + len(bare) :]


def _utf8(field: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(field, "is not valid Unicode text") from None


def _template_source(directory: Path, config: Mapping[str, Any]) -> str | None:
    """A file of its own comes before the tokenizer's config; of several templates the default one counts."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    templates = config.get("chat_template")
    if isinstance(templates, list):
        templates = next((item.get("template") for item in templates if item.get("name") == "default"), None)
    return templates if isinstance(templates, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, which templates may write."""
    found = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found
