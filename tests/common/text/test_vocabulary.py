"""Building tokenizers: the ids the models were trained with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import GPT2Tokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from services.common.errors import StartupError
from services.common.text.vocabulary import build_vocabulary
from tests.common.test_model_files import CONFIG, write_directory
from tests.tokenizer import trained
from tests.tokenizer.gguf_files import write_gguf

CASES = json.loads((Path(__file__).parents[2] / "data" / "smollm2-token-ids.json").read_text())
TEXTS = [
    "Hello  12345",
    "don't CAN'T I'll  we've",
    "tab\tand\n\n newline\r\n  x ",
    "从前有 émoji 🙂 e\u0301",
    "3.14159 and 1,000,000",
    "<|im_end|> <think>",
    "a\u00a0b  \n\n\n c",
]


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    return build_vocabulary("").tokenizer


@pytest.mark.parametrize("case", CASES, ids=lambda case: repr(case["text"][:20]))
def test_ids_of_the_embedded_model(smollm: Tokenizer, case: dict[str, Any]) -> None:
    assert smollm.encode(case["text"], add_special_tokens=False).ids == case["ids"]
    assert smollm.encode(case["text"]).ids == case["ids"]  # its files ask for no BOS
    decoded = smollm.decode(case["ids"], skip_special_tokens=False)
    assert decoded == case["text"]


def test_the_byte_vocabulary() -> None:
    vocabulary = build_vocabulary("byte")
    assert vocabulary.tokenizer.encode("Aé").ids == [256, 0x41, 0xC3, 0xA9]
    assert vocabulary.tokenizer.encode("A<eos>", add_special_tokens=False).ids == [0x41, 257]
    assert vocabulary.special_tokens == {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
    }


def reference(rule: str, tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """transformers' own tokenizer of the family, with the same vocabulary."""
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    if rule == "qwen2":
        return Qwen2Tokenizer(vocab=model["vocab"], merges=merges, unk_token="<unk>")
    return GPT2Tokenizer(vocab=model["vocab"], merges=merges, unk_token="<unk>")


@pytest.mark.parametrize("rule", ["qwen2", "gpt-2"])
@pytest.mark.parametrize("text", TEXTS[:5] + TEXTS[6:])
def test_word_rules_are_those_of_transformers(tmp_path: Path, rule: str, text: str) -> None:
    tokenizer = trained.byte_level()
    built = build_vocabulary(str(write_gguf(tmp_path / "m.gguf", rule, tokenizer=tokenizer)))
    expected = reference(rule, tokenizer).encode(text, add_special_tokens=False)
    assert built.tokenizer.encode(text, add_special_tokens=False).ids == expected


def test_llama_3_words_and_bos(tmp_path: Path) -> None:
    built = build_vocabulary(str(write_gguf(tmp_path / "m.gguf", "llama-bpe"))).tokenizer
    words = [word for word, _ in built.pre_tokenizer.pre_tokenize_str("I'll pay 12345\n\n now")]
    assert words == ["I", "'ll", "Ġpay", "Ġ", "123", "45", "ĊĊ", "Ġnow"]
    assert built.encode("hi").tokens[0] == "<s>"
    assert built.encode("hi<s>").tokens.count("<s>") == 2


def test_token_types_of_gguf(tmp_path: Path) -> None:
    built = build_vocabulary(str(write_gguf(tmp_path / "m.gguf", "gpt-2")))
    added = {token.content: token.special for token in _added(built.tokenizer)}
    assert added == {"<unk>": True, "<s>": True, "</s>": True, "<think>": False}
    assert built.tokenizer.token_to_id("<unused>") is None
    assert built.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def _added(tokenizer: Tokenizer) -> list[Any]:
    return list(tokenizer.get_added_tokens_decoder().values())


def test_unknown_kinds_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="'tekken'"):
        build_vocabulary(str(write_gguf(tmp_path / "a.gguf", "tekken")))
    with pytest.raises(StartupError, match="'llama'"):
        build_vocabulary(str(write_gguf(tmp_path / "b.gguf", "default", model="llama")))


def test_a_directory_brings_its_tokenizer(tmp_path: Path) -> None:
    directory = write_directory(
        tmp_path, config=CONFIG, tokenizer_config={"bos_token": {"content": "<s>"}, "x_token": None}
    )
    with pytest.raises(StartupError, match=r"no tokenizer\.json"):
        build_vocabulary(str(directory))
    tokenizer = trained.byte_level()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(directory / "tokenizer.json"))
    built = build_vocabulary(str(directory))
    assert len(built.tokenizer.encode("a prompt of several tokens").ids) == len(
        trained.byte_level().encode("a prompt of several tokens").ids
    )
    assert built.special_tokens == {"bos_token": "<s>"}
    (directory / "tokenizer.json").write_text('{"added_tokens": [], "model": 3}')
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        build_vocabulary(str(directory))
