"""Rank 0's step: forward, sample, report; and what of the batch the logits are needed for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from services.worker.core import Batch, StepResult, TokenMasks
from services.worker.engine.logprobs import LogprobReport
from services.worker.engine.masking import SampleMasks
from services.worker.engine.runner import Indices, ModelRunner, last_tokens
from services.worker.engine.sampler import SampledLogprobs, Sampler
from services.worker.layers.parallel import Parallel
from services.worker.layers.transfer import to_device, to_host


@dataclass(frozen=True, slots=True)
class _PromptSpan:
    """Tokens of a row whose successors are prompt tokens."""

    row: int
    index: Indices  # [span], in the batch
    successors: Indices  # [span]
    count: int  # alternatives to report


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What a step computed, on the device as long as nobody has asked for it."""

    num_rows: int
    rows: Indices  # those that sample
    tokens: torch.Tensor | None  # [rows], int64; None if there are none
    logprobs: SampledLogprobs | None  # by place among `rows`
    prompt_logprobs: Mapping[int, LogprobReport]  # by row of the batch

    def to_host(self) -> StepTensors:
        """The same on the host, whole when the current stream has come so far.

        The originals must be kept until then.
        """
        logprobs = self.logprobs
        return replace(
            self,
            tokens=to_host(self.tokens) if self.tokens is not None else None,
            logprobs=(logprobs[0], logprobs[1].to_host()) if logprobs is not None else None,
            prompt_logprobs={row: report.to_host() for row, report in self.prompt_logprobs.items()},
        )

    def result(self) -> StepResult:
        """The step's result; of tensors on the host."""
        token_ids = np.full(self.num_rows, -1, dtype=np.int32)
        if self.tokens is not None:
            token_ids[self.rows] = self.tokens.numpy()
        logprobs = {}
        if self.logprobs is not None:
            places, report = self.logprobs
            rows = self.rows[places].tolist()
            logprobs = dict(zip(rows, report.entries(), strict=True))
        prompt = {row: report.entries() for row, report in self.prompt_logprobs.items()}
        return StepResult(token_ids, logprobs, prompt)


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

    def step(self, batch: Batch) -> StepResult:
        """Computes a batch and samples; on a CPU, where what is launched is done."""
        return self.launch(batch).result()

    @torch.inference_mode()
    def launch(self, batch: Batch) -> StepTensors:
        """Queues a batch and its sampling on the device. Never waits for the device."""
        for admission in batch.admissions:
            self._sampler.admit(admission)
        sampled = last_tokens(batch)
        spans = self._prompt_spans(batch)
        index = np.concatenate([sampled, *(span.index for span in spans)])
        if self._announce is not None:
            self._announce(batch, index)
        logits = self._runner.forward(batch, index)
        assert logits is not None, "only rank 0 runs steps"
        prompt = self._report_prompt(logits[len(sampled) :], spans)
        rows = np.flatnonzero(batch.sample)
        if not len(rows):
            return StepTensors(batch.num_rows, rows, None, None, prompt)
        tokens, logprobs = self._sampler.sample(
            logits[: len(sampled)],
            batch.slots[rows],
            batch.output_positions[rows],
            _sample_masks(batch.masks, rows),
        )
        self._parallel.broadcast(tokens)
        self._runner.store(batch, tokens)
        return StepTensors(batch.num_rows, rows, tokens, logprobs, prompt)

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
        self, logits: torch.Tensor, spans: list[_PromptSpan]
    ) -> dict[int, LogprobReport]:
        """logits: [tokens of all spans, vocab]"""
        answer, begin = {}, 0
        for span in spans:
            end = begin + len(span.index)
            chosen = to_device(span.successors, logits.device)
            counts = [span.count] * len(chosen)
            answer[span.row] = LogprobReport.of(
                logits[begin:end], chosen, counts, alone=self._sampler.alone
            )
            begin = end
        return answer


def _sample_masks(masks: TokenMasks | None, rows: Indices) -> SampleMasks | None:
    """A batch's masks by place among the rows that sample. Blocks until they are filled in:
    by now the forward is running, or done, and so they mostly are."""
    if masks is None:
        return None
    return SampleMasks(np.searchsorted(rows, masks.rows), masks.wait())


@torch.inference_mode()
def follow(runner: ModelRunner, parallel: Parallel, batch: Batch, logit_index: Indices) -> None:
    """What the other ranks do of a step: the forward pass, and taking over rank 0's tokens."""
    runner.forward(batch, logit_index)
    if batch.sample.any():
        tokens = runner.empty_tokens(int(batch.sample.sum()))
        runner.store(batch, parallel.broadcast(tokens))
