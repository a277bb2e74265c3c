"""Values of flags and `SHOAL_*` variables: from a text to what the field's type says."""

from __future__ import annotations

import argparse
import math
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, Literal

from services.common.numerals import read_float, read_int


def converter(hint: Any) -> Callable[[str], Any]:
    """What reads the text of a field of this type. Raises TypeError if it has no form as text."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        (inner,) = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return converter(inner)
    if origin is Literal:
        return str
    if origin is tuple:
        return _split
    if hint is bool:
        return _boolean
    if hint is int:
        return _integer
    if hint is float:
        return _number
    if hint is str:
        return str
    raise TypeError(f"no command-line form for {hint}")


def joined(given: Iterable[Any]) -> tuple[str, ...]:
    """What a repeated flag was given: texts, in tuples or lists of tuples."""
    texts: list[str] = []
    for item in given:
        texts.extend([item] if isinstance(item, str) else joined(item))
    return tuple(texts)


def whole(text: str) -> tuple[str, ...]:
    """A tuple of the one text, commas and all."""
    return (text,)


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _integer(text: str) -> int:
    try:
        return read_int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _number(text: str) -> float:
    try:
        number = read_float(text)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    return number


def _boolean(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off", ""):
        return False
    raise ValueError(f"{text!r} is not a boolean; say true or false")
