"""Numbers as people write them, and not as Python does."""

from __future__ import annotations

import math

import pytest

from services.common.numerals import read_float, read_int


@pytest.mark.parametrize("text", ["1_0", "١", "１０", "", "x", "0x10", "1,5"])
def test_what_only_python_takes_is_no_number(text: str) -> None:
    for read in (read_float, read_int):
        with pytest.raises(ValueError, match=r"number|invalid|could not"):
            read(text)


def test_numbers_are_read() -> None:
    assert [read_float(text) for text in ("2.5", "-1", "1e3", "inf")] == [2.5, -1, 1000, math.inf]
    assert [read_int(text) for text in ("7", "-1", "+2")] == [7, -1, 2]
