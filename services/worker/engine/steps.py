"""Rank 0's step: forward, sample, report; and what of the batch the logits are needed for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

import numpy as np
import torch

from services.worker.core import Batch, StepResult, TokenMasks
from services.worker.engine.logprobs import LogprobReport
from services.worker.engine.masking import SampleMasks
from services.worker.engine.runner import Indices, Logits, ModelRunner, last_tokens
from services.worker.engine.sampler import SampledLogprobs, Sampler
from services.worker.layers.parallel import Parallel
from services.worker.layers.transfer import to_device, to_host

# Prompt tokens whose logits are held at a time: those of a whole prompt would take gigabytes
# that the KV pool was not sized to leave.
_LOGIT_ROWS = 256


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
    prompt_reports: Sequence[LogprobReport]  # of all rows' prompt tokens, in order
    prompt_lengths: Mapping[int, int]  # tokens in these, by row of the batch

    def to_host(self) -> StepTensors:
        """The same on the host, whole when the current stream has come so far.

        The originals must be kept until then.
        """
        logprobs = self.logprobs
        return replace(
            self,
            tokens=to_host(self.tokens) if self.tokens is not None else None,
            logprobs=(logprobs[0], logprobs[1].to_host()) if logprobs is not None else None,
            prompt_reports=[report.to_host() for report in self.prompt_reports],
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
        entries = chain.from_iterable(report.entries() for report in self.prompt_reports)
        prompt = {row: list(islice(entries, count)) for row, count in self.prompt_lengths.items()}
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
        logits_of = self._runner.forward(batch)
        first, *others = _logit_slices(batch, index)
        logits = logits_of(first)
        assert logits is not None, "only rank 0 runs steps"
        reports = self._report_prompt(logits_of, others, spans)
        lengths = {span.row: len(span.index) for span in spans}
        rows = np.flatnonzero(batch.sample)
        if not len(rows):
            return StepTensors(batch.num_rows, rows, None, None, reports, lengths)
        tokens, logprobs = self._sampler.sample(
            logits,
            batch.slots[rows],
            batch.output_positions[rows],
            _sample_masks(batch.masks, rows),
        )
        self._parallel.broadcast(tokens)
        self._runner.store(batch, tokens)
        return StepTensors(batch.num_rows, rows, tokens, logprobs, reports, lengths)

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
        self, logits_of: Logits, slices: Sequence[Indices], spans: Sequence[_PromptSpan]
    ) -> list[LogprobReport]:
        """One report a slice; the slices are the spans' indices, one after the other."""
        if not spans:
            return []
        successors = np.concatenate([span.successors for span in spans])
        counts = [span.count for span in spans for _ in span.index]
        reports, begin = [], 0
        for index in slices:
            end = begin + len(index)
            logits = logits_of(index)
            assert logits is not None, "only rank 0 runs steps"
            chosen = to_device(successors[begin:end], logits.device)
            alone = self._sampler.alone
            reports.append(LogprobReport.of(logits, chosen, counts[begin:end], alone=alone))
            begin = end
        return reports


def _logit_slices(batch: Batch, index: Indices) -> list[Indices]:
    """The tokens that logits are needed of: those that sample, then the others in pieces."""
    sampled = int(batch.sample.sum())
    pieces = range(sampled, len(index), _LOGIT_ROWS)
    return [index[:sampled], *(index[at : at + _LOGIT_ROWS] for at in pieces)]


def _sample_masks(masks: TokenMasks | None, rows: Indices) -> SampleMasks | None:
    """A batch's masks by place among the rows that sample. Blocks until they are filled in:
    by now the forward is running, or done, and so they mostly are."""
    if masks is None:
        return None
    return SampleMasks(np.searchsorted(rows, masks.rows), masks.wait())


@torch.inference_mode()
def follow(runner: ModelRunner, parallel: Parallel, batch: Batch, logit_index: Indices) -> None:
    """What the other ranks do of a step: the forward pass, and taking over rank 0's tokens."""
    logits_of = runner.forward(batch)
    for index in _logit_slices(batch, logit_index):
        logits_of(index)
    if batch.sample.any():
        tokens = runner.empty_tokens(int(batch.sample.sum()))
        runner.store(batch, parallel.broadcast(tokens))
