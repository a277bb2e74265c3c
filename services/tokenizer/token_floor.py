"""How few tokens a text can have, told without encoding it.

A token stands for at most so many bytes of the text, so a text of many bytes has at least so
many tokens. That holds only where no byte is lost on the way to the tokens; where one may be,
a tokenizer has no floor:

    text --added tokens--> --normalizer--> --cut into words--> --model--> tokens
           may strip        may shrink      may drop blanks     may drop, or
           blanks                                               fuse what it
                                                                does not know
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from services.common.text.byte_level import byte_alphabet

_NFC_SHRINKS = 4  # times at most, in UTF-8; a small Greek iota with two accents by 3.5
_CUTTERS = frozenset({"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation"})


@dataclass(frozen=True, slots=True)
class TokenFloor:
    """What bounds one tokenizer's number of tokens from below.

    `longest` is the most bytes that a token stands for. `dropped` are bytes that the
    vocabulary lacks, and the model leaves out. `composes`: text is put into NFC first.
    """

    longest: int
    dropped: bytes = b""
    composes: bool = False

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenFloor | None:
        """None where a part of the tokenizer may lose text in a way that is not bounded here."""
        state: dict[str, Any] = json.loads(tokenizer.to_str())
        normalizers = list(_parts(state["normalizer"], "normalizers"))
        cutters = list(_parts(state["pre_tokenizer"], "pretokenizers"))
        composes = [part["type"] for part in normalizers] == ["NFC"]
        if not (
            (composes or all(map(_grows, normalizers)))
            and all(map(_keeps_all, cutters))
            and not any(token["lstrip"] or token["rstrip"] for token in state["added_tokens"])
        ):
            return None
        model = state["model"]
        if model["type"] != "BPE":
            return None
        kinds = [part["type"] for part in cutters]
        dropped = _dropped(model, byte_level="ByteLevel" in kinds)
        if dropped is None or "ByteLevel" in kinds[:-1]:
            return None
        words = model["vocab"]
        # Of a byte-level word each character is a byte; of any other, those that it is spelt with.
        longest = max(map(len, words) if "ByteLevel" in kinds else map(_num_bytes, words))
        for token in state["added_tokens"]:
            text = token["content"]
            normal = tokenizer.normalizer.normalize_str(text) if normalizers else text
            longest = max(longest, _num_bytes(text), _num_bytes(normal))
        return cls(longest, dropped, composes)

    def least(self, text: str) -> int:
        """The number of tokens that the text, which is valid Unicode, has at least."""
        data = text.encode()
        shrinks = 1
        if self.composes and not text.isascii():
            if self.dropped:  # into which others may be composed
                return 0
            shrinks = _NFC_SHRINKS
        if self.dropped:
            data = data.translate(None, self.dropped)
        return -(-len(data) // (self.longest * shrinks))


def _parts(step: dict[str, Any] | None, members: str) -> Iterator[dict[str, Any]]:
    """The steps of which a step consists."""
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
        return
    for part in step[members]:
        yield from _parts(part, members)


def _grows(normalizer: dict[str, Any]) -> bool:
    """Whether no text that it changes gets shorter."""
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String")
        return bool(pattern) and _num_bytes(normalizer["content"]) >= _num_bytes(pattern)
    return bool(normalizer["type"] == "Prepend")


def _keeps_all(cutter: dict[str, Any]) -> bool:
    return cutter["type"] in _CUTTERS and cutter.get("behavior") != "Removed"


def _dropped(model: dict[str, Any], *, byte_level: bool) -> bytes | None:
    """The bytes for which a BPE model may have no token; None where they may be any."""
    vocab = model["vocab"]
    if model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        return None  # then a byte has several spellings
    if byte_level:
        return bytes(byte for spelt, byte in byte_alphabet().items() if spelt not in vocab)
    if model["byte_fallback"] and all(f"<0x{byte:02X}>" in vocab for byte in range(256)):
        return b""
    return None


def _num_bytes(text: str) -> int:
    return len(text.encode())
