"""Rank 0's step: forward, sample, report; and what of the batch the logits are needed for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from services.worker.core import Batch, StepResult, TokenLogprobs
from services.worker.engine.runner import Indices, ModelRunner, last_tokens
from services.worker.engine.sampler import Sampler, report_logprobs
from services.worker.layers.parallel import Parallel


@dataclass(frozen=True, slots=True)
class _PromptSpan:
    """Tokens of a row whose successors are prompt tokens."""

    row: int
    index: Indices  # [span], in the batch
    successors: Indices  # [span]
    count: int  # alternatives to report


class StepRunner:
    """Runs batches on rank 0. `announce` tells the other ranks of one before it is run."""

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        parallel: Parallel,
        announce: Callable[[Batch, Indices], None] | None = None,
    ) -> None:
        self._runner = runner
        self._sampler = sampler
        self._parallel = parallel
        self._announce = announce

    @torch.inference_mode()
    def step(self, batch: Batch) -> StepResult:
        """Computes a batch and samples."""
        for admission in batch.admissions:
            self._sampler.admit(admission)
        sampled = last_tokens(batch)
        spans = self._prompt_spans(batch)
        index = np.concatenate([sampled, *(span.index for span in spans)])
        if self._announce is not None:
            self._announce(batch, index)
        logits = self._runner.forward(batch, index)
        assert logits is not None, "only rank 0 runs steps"
        prompt_logprobs = _report_prompt(logits[len(sampled) :], spans)
        token_ids = np.full(batch.num_rows, -1, dtype=np.int32)
        if not len(sampled):
            return StepResult(token_ids, prompt_logprobs=prompt_logprobs)
        rows = np.flatnonzero(batch.sample)
        tokens, logprobs = self._sampler.sample(
            logits[: len(sampled)], batch.slots[rows], batch.output_positions[rows]
        )
        self._parallel.broadcast(tokens)
        self._runner.store(batch, tokens)
        token_ids[rows] = tokens.numpy()
        by_row = {int(rows[i]): logprob for i, logprob in logprobs.items()}
        return StepResult(token_ids, by_row, prompt_logprobs)

    def _prompt_spans(self, batch: Batch) -> list[_PromptSpan]:
        state = self._sampler.slots
        spans = []
        for row in np.flatnonzero(state.wants_prompt_logprobs[batch.slots]).tolist():
            admission = state.admissions[int(batch.slots[row])]
            start, length = int(batch.start[row]), int(batch.query_lens[row])
            successors = admission.prompt_ids[start + 1 : start + length + 1].astype(np.int64)
            if len(successors):
                first = int(batch.query_lens[:row].sum())
                index = np.arange(first, first + len(successors), dtype=np.int64)
                count = admission.sampling.prompt_logprobs or 0
                spans.append(_PromptSpan(row, index, successors, count))
        return spans


def _report_prompt(
    logits: torch.Tensor, spans: list[_PromptSpan]
) -> dict[int, list[TokenLogprobs]]:
    """logits: [tokens of all spans, vocab]"""
    answer, begin = {}, 0
    for span in spans:
        end = begin + len(span.index)
        chosen = torch.from_numpy(span.successors)
        answer[span.row] = report_logprobs(logits[begin:end], chosen, [span.count] * len(chosen))
        begin = end
    return answer
