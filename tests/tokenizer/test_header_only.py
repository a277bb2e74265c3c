"""A GGUF file without its weights is the same vocabulary."""

from __future__ import annotations

import shutil
from pathlib import Path

from services.common.model_files import resolve
from services.common.text.vocabulary import build_vocabulary
from services.tokenizer.header_only import main

TEXT = "The cat sat on the mat, 猫 and 🙂 too.\n"


def test_a_cut_file_encodes_as_before(tmp_path: Path) -> None:
    whole = resolve("").path
    part = tmp_path / whole.name
    shutil.copy(whole, part)
    main([str(part)])
    assert part.stat().st_size * 10 < whole.stat().st_size
    before, after = (build_vocabulary(str(path)) for path in (whole, part))
    assert after.tokenizer.encode(TEXT).ids == before.tokenizer.encode(TEXT).ids
    assert after.metadata == before.metadata
    main([str(part)])  # there is nothing left to cut
    assert build_vocabulary(str(part)).metadata == before.metadata
