"""Whether a GGUF file is whole, by its header and its length alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.errors import StartupError
from services.common.gguf_header import check_whole
from services.common.model_files import resolve


@pytest.mark.parametrize("missing", [1, 17, 1000])
def test_a_file_that_ends_inside_its_last_tensor_is_cut_short(tmp_path: Path, missing: int) -> None:
    whole = resolve("").path
    size = whole.stat().st_size
    copy = tmp_path / "copy.gguf"
    with whole.open("rb") as file:
        copy.write_bytes(file.read(4 << 20))  # the header; the rest stays a hole
    with copy.open("r+b") as file:
        file.truncate(size)
        check_whole(copy)
        file.truncate(size - missing)
    with pytest.raises(StartupError, match=f"is cut short: {size - missing} bytes, .* at {size};"):
        check_whole(copy)
