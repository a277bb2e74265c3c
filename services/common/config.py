"""Frozen dataclasses as command lines.

A process's configuration is one frozen dataclass whose fields are made by
`option`. `parse` reads it from flags and `SHOAL_*` variables (a flag wins), and
`to_argv` writes it back, so that a supervisor can start a child from a config. A secret
goes to a child by `secret_environment`, since everybody can read a command line.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NoReturn, TypeVar

from services import __version__
from services.common.bounds import Bounds
from services.common.flag_values import converter, joined, whole

T = TypeVar("T")


def option(
    default: Any,
    help: str,
    *,
    group: str = "options",
    choices: Sequence[str] | None = None,
    metavar: str | None = None,
    secret: bool = False,
    commas: bool = True,
    many: bool = False,
    bounds: Bounds | None = None,
) -> Any:
    """A dataclass field that is also the flag `--its-name` and `SHOAL_ITS_NAME`.

    A tuple's flag may be repeated, and takes commas, but for those whose values may have some
    (`commas=False`). With `many` it takes all words up to the next flag. A `secret` is kept out
    of the config's repr and of command lines. A number is to keep its `bounds` (`check_bounds`).
    """
    metadata = {
        "help": help,
        "group": group,
        "choices": choices,
        "metavar": metavar,
        "secret": secret,
        "commas": commas,
        "many": many,
        "bounds": bounds,
    }
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


def borrow(cls: type, name: str, *, default: Any = dataclasses.MISSING, **changes: Any) -> Any:
    """The field `name` of another config: its default and help keep their one home there.

    `changes` replace parts of its description (`help`, `group`).
    """
    (source,) = [field for field in options(cls) if field.name == name]
    choices = _choices(source, typing.get_type_hints(cls)[name])
    metadata = {**source.metadata, "choices": choices, **changes}
    if default is dataclasses.MISSING:
        default = source.default
    return dataclasses.field(default=default, metadata=metadata, repr=source.repr)


def share(cls: type[T], config: Any, **own: Any) -> T:
    """A config of class `cls` with what `config` has under the same names, and `own`."""
    names = {field.name for field in options(cls)}
    shared = {
        field.name: getattr(config, field.name)
        for field in options(type(config))
        if field.name in names
    }
    return cls(**{**shared, **own})


def check_bounds(config: Any) -> None:
    """Raises ValueError for the first number out of its option's bounds. A config that may be made
    without `parse` calls it when it is made."""
    for field in options(type(config)):
        value, bounds = getattr(config, field.name), field.metadata["bounds"]
        if bounds is not None and value is not None and not bounds.hold(value):
            raise ValueError(
                f"{flag_name(field.name)} {value} is out of range: {bounds.why_not(value)}"
            )


def parse(cls: type[T], argv: Sequence[str], *, prog: str, description: str) -> T:
    """Reads a config from a command line and the environment.

    Raises SystemExit(2) after one sentence on bad input and SystemExit(0) on --help.
    """
    parser = build_parser(cls, prog=prog, description=description)
    return from_namespace(cls, parser, parser.parse_args(argv))


def build_parser(cls: type, *, prog: str, description: str) -> argparse.ArgumentParser:
    """The parser of a config class, its flags in the order and groups of the fields."""
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [flags]",
        description=description,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"shoal {__version__}")
    groups: dict[str, Any] = {}
    hints = typing.get_type_hints(cls)
    for field in options(cls):
        title = field.metadata["group"]
        group = groups.get(title)
        if group is None:
            group = groups[title] = parser.add_argument_group(title)
        _add_flag(group, field, hints[field.name])
    return parser


def from_namespace(cls: type[T], parser: argparse.ArgumentParser, args: argparse.Namespace) -> T:
    """Builds the config from parsed arguments, the environment filling the gaps."""
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for field in options(cls):
        if hasattr(args, field.name):
            given = getattr(args, field.name)
            values[field.name] = joined(given) if isinstance(given, list) else given
            continue
        name = env_name(field.name)
        text = os.environ.get(name)
        if text is None:
            continue
        try:
            values[field.name] = _converter_of(field, hints[field.name])(text)
        except (ValueError, argparse.ArgumentTypeError) as error:
            parser.error(f"environment variable {name}: {error}")
        choices = _choices(field, hints[field.name])
        if choices and values[field.name] not in choices:
            parser.error(f"environment variable {name}: choose from {', '.join(choices)}")
    try:
        config = cls(**values)
        check_bounds(config)
        return config
    except ValueError as error:
        parser.error(str(error))


def to_argv(config: Any) -> list[str]:
    """The flags that rebuild a config, but for its secrets: those that are not defaults."""
    argv: list[str] = []
    for field in options(type(config)):
        value = getattr(config, field.name)
        if value == field.default or field.metadata["secret"]:
            continue
        flag = flag_name(field.name)
        if isinstance(value, bool):
            argv.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, tuple):
            argv.append(f"{flag}={','.join(value)}")
        else:
            argv.append(f"{flag}={value}")
    return argv


def secret_environment(config: Any) -> dict[str, str]:
    """The variables that rebuild a config's secrets."""
    secrets = {
        field.name: getattr(config, field.name)
        for field in options(type(config))
        if field.metadata["secret"] and getattr(config, field.name) != field.default
    }
    return {
        env_name(name): ",".join(value) if isinstance(value, tuple) else str(value)
        for name, value in secrets.items()
    }


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def env_name(field_name: str) -> str:
    return "SHOAL_" + field_name.upper()


def options(cls: type) -> list[dataclasses.Field[Any]]:
    """The fields of a config class that are flags, in their order."""
    return [field for field in dataclasses.fields(cls) if "help" in field.metadata]


def help_text(field: dataclasses.Field[Any]) -> str:
    """What an option is for, and the bounds of a number."""
    text, bounds = field.metadata["help"], field.metadata["bounds"]
    return f"{text}; {bounds}" if bounds is not None else text


def _add_flag(group: Any, field: dataclasses.Field[Any], hint: Any) -> None:
    text = help_text(field)
    default = field.default
    if default is not False and default not in (None, (), "") and "default" not in text.lower():
        text += f" (default: {','.join(default) if isinstance(default, tuple) else default})"
    kwargs: dict[str, Any] = {"help": text.replace("%", "%%"), "default": argparse.SUPPRESS}
    if hint is bool:
        action: Any = argparse.BooleanOptionalAction if default else "store_true"
        group.add_argument(flag_name(field.name), dest=field.name, action=action, **kwargs)
        return
    choices = _choices(field, hint)
    if typing.get_origin(hint) is tuple:
        kwargs["action"] = "append"
        if field.metadata["many"]:
            kwargs["nargs"] = "+"
    if choices:
        kwargs["choices"] = choices
    else:
        kwargs["metavar"] = field.metadata["metavar"] or ("TEXT" if hint is str else "N")
    kwargs["type"] = _converter_of(field, hint)
    group.add_argument(flag_name(field.name), dest=field.name, **kwargs)


def _choices(field: dataclasses.Field[Any], hint: Any) -> tuple[str, ...] | None:
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)
    choices = field.metadata["choices"]
    return tuple(choices) if choices else None


def _converter_of(field: dataclasses.Field[Any], hint: Any) -> Callable[[str], Any]:
    return converter(hint) if field.metadata["commas"] else whole


class _Parser(argparse.ArgumentParser):
    """Answers a mistake with one sentence, not with the list of all flags."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            meant = nearest(unknown[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        return parsed

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` for a misspelt word; empty if nothing is near."""
    found = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {found[0]}?" if found else ""


class _HelpFormatter(argparse.HelpFormatter):
    """Flags in one column wide enough for the longest."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=100)
