"""What `--quantization int8` costs: perplexity of both precisions on text that every machine has.

    python -m bench.perplexity --tokens 20000

The text is Python's own language reference (`pydoc_data.topics`), cut into windows; every token
of a window but the first is scored, given those before it.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal, get_args

import numpy as np
import torch

from bench.figures import machine
from services.common import logs
from services.common.config import option, parse
from services.common.text.vocabulary import build_vocabulary
from services.worker.config import WorkerConfig
from services.worker.core import Batch
from services.worker.engine.loading import load_model
from services.worker.engine.runner import ModelRunner
from services.worker.engine.torch_engine import set_threads
from services.worker.layers.parallel import Parallel

Quantization = Literal["none", "int8"]
PAGE_SIZE = 16


@dataclass(frozen=True)
class BenchConfig:
    """What is measured."""

    model: str = option("", "hub id, directory or .gguf file; default: the embedded model")
    tokens: int = option(20_000, "tokens of text")
    window: int = option(512, "tokens that are computed together")
    num_threads: int = option(0, "CPU threads; default: all cores")
    json: str = option("", "file for the figures; default: none")


def text_windows(config: BenchConfig) -> Iterator[list[int]]:
    """The first tokens of the text, in windows of at least two."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    # Eight characters a token are more than any tokenizer makes of English.
    vocabulary = build_vocabulary(config.model)
    ids = vocabulary.tokenizer.encode(text[: 8 * config.tokens], add_special_tokens=False).ids
    for begin in range(0, min(config.tokens, len(ids)) - 1, config.window):
        yield ids[begin : min(begin + config.window, config.tokens)]


def perplexity(config: BenchConfig, quantization: Quantization) -> float:
    """e to the mean negative log-probability of a token."""
    pages = -(-config.window // PAGE_SIZE)
    worker = WorkerConfig(
        model=config.model,
        quantization=quantization,
        page_size=PAGE_SIZE,
        num_pages=pages,
        max_running_requests=1,
        num_threads=config.num_threads,
    )
    set_threads(worker)
    runner = load_model(worker, Parallel(), lambda *_: None).runner
    total, count = 0.0, 0
    with torch.inference_mode():
        for ids in text_windows(config):
            total += _negative_log_likelihood(runner, ids, pages)
            count += len(ids) - 1
    return math.exp(total / count)


def _negative_log_likelihood(runner: ModelRunner, ids: Sequence[int], pages: int) -> float:
    one = np.ones(1, np.int32)
    batch = Batch(
        step=0,
        slots=one - 1,
        start=one - 1,
        query_lens=one * len(ids),
        input_ids=np.array(ids, np.int32),
        page_tables=np.arange(pages, dtype=np.int32)[None],
        sample=np.zeros(1, np.bool_),
        output_positions=one - 1,
    )
    logits = runner.forward(batch)(np.arange(len(ids) - 1))
    assert logits is not None, "there is one rank"
    successors = torch.tensor(ids[1:])
    return float(torch.nn.functional.cross_entropy(logits, successors, reduction="sum"))


def main(argv: list[str]) -> None:
    """Measures, prints, and writes the figures to a file if one is named."""
    config = parse(BenchConfig, argv, prog="bench.perplexity", description=__doc__ or "")
    logs.setup("bench", level="warning")
    facts = machine()
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    figures: dict[str, float] = {}
    for quantization in get_args(Quantization):
        figures[quantization] = perplexity(config, quantization)
        print(f"{quantization:<6}{figures[quantization]:>12.4f}", flush=True)
    figures["int8 against none, %"] = 100 * (figures["int8"] / figures["none"] - 1)
    print(f"int8 rises by {figures['int8 against none, %']:.3f} %")
    if config.json:
        report = {"machine": facts, "tokens": config.tokens, "figures": figures}
        Path(config.json).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
