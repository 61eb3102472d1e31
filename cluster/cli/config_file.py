"""`--config FILE`: what a command's options are unless the command line says otherwise, from YAML."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.cli.options import path
from cluster.cli.running import usage_errors

MAX_BYTES = 1 << 20
NOT_IN_A_FILE = ("", "help", "config")


def read_config(context: typer.Context, file: Path | None) -> Path | None:
    """Make what the file says the defaults of the command's other options; wrong keys and values are wrong usage."""
    if file is not None and not context.resilient_parsing:
        with usage_errors():
            context.default_map = option_values(context.command.params, read_yaml(file), file)
    return file


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        parser=path,
        is_eager=True,
        callback=read_config,
        help="YAML with names of options as keys, such as max-batch: 64. The command line comes first.",
    ),
]


def read_yaml(file: Path) -> Mapping[Any, Any]:
    """The mapping in a file; an empty file is an empty one. Raises ValueError naming the file."""
    import yaml

    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"{file} is longer than {MAX_BYTES} bytes")
        values = yaml.safe_load(content)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, Mapping | None):
        raise ValueError(f"{file} must hold names and values, such as max-batch: 64")
    return values or {}


def option_values(parameters: Sequence[Any], values: Mapping[Any, Any], file: Path) -> dict[str, Any]:
    """Values by parameter, each as the command line would give it. Raises ValueError naming the key."""
    known = {key: parameter for parameter in parameters if (key := _key(parameter)) not in NOT_IN_A_FILE}
    found: dict[str, Any] = {}
    for written, value in values.items():
        key = str(written).replace("_", "-")
        parameter = known.get(key)
        if parameter is None:
            raise ValueError(f"{file}: there is no option {written!r:.60}; there are {', '.join(sorted(known))}")
        if parameter.name in found:
            raise ValueError(f"{file}: {key} is said twice")
        if value is not None:
            found[parameter.name] = _given(parameter, value, f"{file}: {key}")
    return found


def _key(parameter: Any) -> str:
    """The first long name of an option, without its dashes; "" where there is none."""
    return next((name.removeprefix("--") for name in parameter.opts if name.startswith("--")), "")


def _given(parameter: Any, value: Any, place: str) -> Any:
    if parameter.is_flag:
        if not isinstance(value, bool):
            raise ValueError(f"{place} is {value!r:.40}, must be true or false")
        return value
    if parameter.multiple:
        if isinstance(value, Mapping):
            return [f"{name}={_text(one, place)}" for name, one in value.items()]
        return [_text(one, place) for one in (value if isinstance(value, list) else [value])]
    if isinstance(value, list):
        return ",".join(_text(one, place) for one in value)
    return _text(value, place)


def _text(value: Any, place: str) -> str:
    """As it would be typed; of what is no text and no number in a setting, its JSON, which YAML reads back."""
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, Mapping):
        raise ValueError(f"{place} is {value!r:.40}, must be a value")
    return json.dumps(value)
