"""What a replica needs of a tokenizer, and where its work is done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from cluster.codec import AnyRequest, Messages, messages_from_proto
from protos import generation_pb2
from worker.errors import InvalidRequest, QueueFull
from worker.load import EngineInfo

MAX_BYTES_PER_TOKEN = 32
"""A text longer than this for every token of the context is refused without being tokenised."""
NUM_THREADS = 2
SLOW_S = 0.02
"""A short text that took longer than this held up every stream of the replica."""
MAX_SLOW = 3.0
"""After so many of them, less one for each hundred quick texts, no text is short any more: it is the model's tokenizer
or template that is slow."""

T = TypeVar("T")


class TextProcessor(Protocol):
    """A model's tokenizer and chat template. Its methods may be called on any thread; InvalidRequest = client's fault."""

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can work."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, which is never parsed for control tokens."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids."""

    def render_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Token ids of a conversation of (role, content), ready for the assistant's answer."""


class Texts:
    """Turns requests into token ids: short texts at once, longer ones on a thread, so that no stream waits for them.

    What takes longer than `timeout_s` is refused. A thread cannot be ended, so the work goes on behind it; a tokenizer
    takes time in proportion to its text and templates have a limit of their own, so it ends soon.
    """

    def __init__(
        self, processor: TextProcessor | None, info: EngineInfo, *, inline_bytes: int, timeout_s: float = 5.0
    ) -> None:
        self._processor = processor
        self._info = info
        self._inline_bytes = inline_bytes
        self._timeout_s = timeout_s
        self._num_slow = 0.0
        self._threads = ThreadPoolExecutor(max_workers=NUM_THREADS, thread_name_prefix="graphpool-text")

    async def prompt(self, request: AnyRequest) -> tuple[int, ...]:
        """Token ids of the prompt. Raises InvalidRequest naming the field."""
        if isinstance(request, generation_pb2.ChatRequest):
            return tuple(await self.render(messages_from_proto(request.messages)))
        if request.WhichOneof("prompt") == "token_ids":
            return tuple(request.token_ids.ids)
        return tuple(await self.encode(request.text, add_special_tokens=True))

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        processor = self._tokenizer("text")
        size = self._check_size("text", (text,))
        return await self._run("text", size, lambda: processor.encode(text, add_special_tokens=add_special_tokens))

    async def render(self, messages: Messages) -> list[int]:
        """Token ids of a conversation."""
        processor = self._tokenizer("messages")
        if not processor.has_chat_template:
            raise InvalidRequest("messages", "this model has no chat template; send text or token_ids")
        size = self._check_size("messages", [content for _, content in messages])
        return await self._run("messages", size, lambda: processor.render_chat(messages))

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids."""
        processor = self._tokenizer("token_ids")
        size = 4 * len(ids)
        return await self._run(
            "token_ids", size, lambda: processor.decode(ids, skip_special_tokens=skip_special_tokens)
        )

    def close(self) -> None:
        """Let the threads go."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _tokenizer(self, field: str) -> TextProcessor:
        if self._processor is None:
            raise InvalidRequest(field, "this model is served without a tokenizer; send token_ids")
        return self._processor

    def _check_size(self, field: str, texts: Sequence[str]) -> int:
        size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        limit = MAX_BYTES_PER_TOKEN * self._info.max_model_len
        if size > limit:
            raise InvalidRequest(
                field, f"{size} bytes cannot fit the context of {self._info.max_model_len} tokens; the limit is {limit}"
            )
        return size

    async def _run(self, field: str, size: int, work: Callable[[], T]) -> T:
        if size <= self._inline_bytes and self._num_slow < MAX_SLOW:
            return self._run_here(work)
        task = self._threads.submit(work)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(asyncio.wrap_future(task))
        except TimeoutError:
            if task.cancel():
                raise QueueFull(NUM_THREADS, NUM_THREADS, self._timeout_s) from None
            raise InvalidRequest(field, f"takes longer than {self._timeout_s:g} s to turn into tokens") from None
        except asyncio.CancelledError:
            task.cancel()
            raise

    def _run_here(self, work: Callable[[], T]) -> T:
        started_s = time.perf_counter()
        try:
            return work()
        finally:
            is_slow = time.perf_counter() - started_s > SLOW_S
            self._num_slow = self._num_slow + 1 if is_slow else max(0.0, self._num_slow - 0.01)
