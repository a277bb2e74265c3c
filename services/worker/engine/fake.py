"""`--engine fake`: tokens from a hash, through a real page table.

There are no weights. The KV pool holds one 64-bit state for each position, and a token
depends on states read back through the page table, so that a scheduler that mixes up
pages, slots or positions changes the tokens. They are otherwise a pure function of the
ids before them: `fake_tokens` computes the same ones without pages.

    state(p)  = state(p - 1) * A + (id(p) + 1) * C              mod 2**64, state(-1) = S
    digest(p) = sum of state(q) over q <= p, q = p mod 16
    next id   = allowed[finalise(digest(p) + p) mod len(allowed)]

Sixteen steps in a row read every position, each step a sixteenth of them.

Sampling parameters are ignored, but for these: `logprobs` and `prompt_logprobs` are
answered with made-up numbers, the same each time; a `logit_bias` of 100 or more forces
that id, from the position on where `min_tokens` no longer forbids it. A row with a mask
gets the first id that the mask allows, from the one above on and around the vocabulary.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from services.common.model_files import Progress, resolve
from services.common.model_metadata import read_metadata
from services.worker.config import WorkerConfig
from services.worker.core import (
    Admission,
    Batch,
    EngineInfo,
    IntArray,
    PendingStep,
    StepResult,
    TokenLogprobs,
    TokenMasks,
    unpack_mask,
)
from services.worker.engine.thread import EngineThread

Uint64Array = npt.NDArray[np.uint64]

_A = 0x9E3779B97F4A7C15  # odd, so that it has an inverse mod 2**64
_A_INVERSE = pow(_A, -1, 1 << 64)
_C = np.uint64(0xD1342543DE82EF95)
_START = np.uint64(0x2545F4914F6CDD1D)
_STRIDE = 16
_DEFAULT_NUM_PAGES = 16384
_DEFAULT_PREFILL_TOKENS = 512
_FORCING_BIAS = 100.0


def fake_tokens(
    prompt_ids: Sequence[int] | npt.NDArray[Any], num_tokens: int, allowed: Sequence[int]
) -> list[int]:
    """What the fake engine answers to a prompt, computed without pages (the oracle)."""
    mask = (1 << 64) - 1
    state, sums, tokens = int(_START), [0] * _STRIDE, list[int]()
    for position in range(len(prompt_ids) + num_tokens - 1):
        known = position < len(prompt_ids)
        token = int(prompt_ids[position]) if known else tokens[position - len(prompt_ids)]
        state = (state * _A + (token + 1) * int(_C)) & mask
        sums[position % _STRIDE] = (sums[position % _STRIDE] + state) & mask
        if position >= len(prompt_ids) - 1:
            score = _finalise(np.array([sums[position % _STRIDE] + position & mask], np.uint64))
            tokens.append(int(allowed[int(score[0] % np.uint64(len(allowed)))]))
    return tokens


def allowed_ids(model: str) -> list[int]:
    """The ids that the fake engine emits for a model: printable bytes, or all but special ones."""
    files = resolve(model, weights=False)
    if files.kind == "byte":
        return list(range(32, 127))
    metadata = read_metadata(files)
    special = metadata.special_token_ids | metadata.eos_token_ids
    return [token for token in range(metadata.vocab_size) if token not in special]


def load(config: WorkerConfig, progress: Progress) -> FakeEngine:
    """Builds the fake engine for a model's vocabulary, context and end-of-sequence ids."""
    progress("reading the model's files", 0, 1)
    files = resolve(config.model, progress=progress, weights=False)
    metadata = read_metadata(files)
    num_pages = config.num_pages or _DEFAULT_NUM_PAGES
    context = config.max_model_len or metadata.context_length
    name = config.served_model_name or files.name
    info = EngineInfo(
        model=name,
        fingerprint=hashlib.sha256(f"fake:{files.name}".encode()).hexdigest()[:16],
        vocab_size=metadata.vocab_size,
        max_model_len=min(context, metadata.context_length, num_pages * config.page_size),
        page_size=config.page_size,
        num_pages=num_pages,
        max_prefill_tokens=config.max_prefill_tokens or _DEFAULT_PREFILL_TOKENS,
        eos_token_ids=metadata.eos_token_ids,
    )
    progress("reading the model's files", 1, 1)
    allowed = allowed_ids(config.model)
    return FakeEngine(info, config.max_running_requests, allowed, config.fake_step_ms / 1000)


class FakeModel:
    """The states of all positions and slots, and the function of the module's docstring.

    `info.num_pages` pages and the dummy page; `num_slots` slots.
    """

    def __init__(self, info: EngineInfo, num_slots: int, allowed: Sequence[int]) -> None:
        self._page_size = info.page_size
        self._vocab_size = info.vocab_size
        self._states = np.zeros((info.num_pages + 1) * info.page_size, np.uint64)
        self._allowed = np.array(allowed, np.int32)
        self._last_ids = np.zeros(num_slots, np.int32)
        self._admissions: dict[int, Admission] = {}
        self._special = np.zeros(num_slots, np.bool_)  # slots whose parameters matter
        powers = np.full(info.max_prefill_tokens + 1, _A, np.uint64)
        inverses = np.full(info.max_prefill_tokens + 1, _A_INVERSE, np.uint64)
        powers[0] = inverses[0] = 1
        self._powers: Uint64Array = np.cumprod(powers)
        self._inverses: Uint64Array = np.cumprod(inverses)

    def compute(self, batch: Batch) -> StepResult:
        """One step: writes the states of the batch's positions and samples."""
        for admission in batch.admissions:
            self._admissions[admission.slot] = admission
            sampling = admission.sampling
            reports = (sampling.logprobs, sampling.prompt_logprobs) != (None, None)
            self._special[admission.slot] = reports or len(sampling.logit_bias) > 0
        input_ids = self._resolve_ids(batch)
        self._write_states(batch, input_ids)
        sampled = np.flatnonzero(batch.sample)
        token_ids = np.full(batch.num_rows, -1, np.int32)
        scores = self._scores(batch, sampled)
        token_ids[sampled] = self._allowed[scores % np.uint64(len(self._allowed))]
        logprobs = {}
        special = self._special[batch.slots[sampled]]
        for row in sampled[special].tolist():
            self._force(batch, row, token_ids)
        if batch.masks is not None:
            self._obey(batch.masks, token_ids)
        for row, score in zip(sampled[special].tolist(), scores[special].tolist(), strict=True):
            num_top = self._admissions[int(batch.slots[row])].sampling.logprobs
            if num_top is not None:
                logprobs[row] = self._logprobs(int(token_ids[row]), score, num_top)
        self._last_ids[batch.slots[sampled]] = token_ids[sampled]
        return StepResult(token_ids, logprobs, self._prompt_logprobs(batch))

    def _resolve_ids(self, batch: Batch) -> IntArray:
        """The batch's ids, with each -1 replaced by the slot's last sampled token."""
        rows = np.repeat(np.arange(batch.num_rows), batch.query_lens)
        return np.where(batch.input_ids < 0, self._last_ids[batch.slots[rows]], batch.input_ids)

    def _write_states(self, batch: Batch, input_ids: IntArray) -> None:
        terms = (input_ids.astype(np.uint64) + np.uint64(1)) * _C
        single = batch.query_lens == 1
        offsets = np.cumsum(batch.query_lens) - batch.query_lens
        rows = np.flatnonzero(single)
        states = self._before(batch, rows) * np.uint64(_A) + terms[offsets[rows]]
        self._states[self._indices(batch, rows, batch.start[rows])] = states
        for row in np.flatnonzero(~single).tolist():
            self._write_chunk(batch, row, terms[offsets[row] :][: batch.query_lens[row]])

    def _write_chunk(self, batch: Batch, row: int, terms: Uint64Array) -> None:
        """State i of a chunk is A**(i+1) * before + sum over j <= i of A**(i-j) * term j."""
        length = len(terms)
        sums = np.cumsum(terms * self._inverses[:length], dtype=np.uint64)
        before = self._before(batch, np.array([row]))
        states = self._powers[1 : length + 1] * before + self._powers[:length] * sums
        positions = np.arange(batch.start[row], batch.start[row] + length)
        self._states[self._indices(batch, np.full(length, row), positions)] = states

    def _before(self, batch: Batch, rows: npt.NDArray[np.intp]) -> Uint64Array:
        """The state before each row's first position, read through its page table."""
        start = batch.start[rows]
        states = self._states[self._indices(batch, rows, np.maximum(start - 1, 0))]
        return np.where(start == 0, _START, states)

    def _indices(
        self, batch: Batch, rows: npt.NDArray[np.intp], positions: npt.NDArray[Any]
    ) -> npt.NDArray[np.int64]:
        pages: npt.NDArray[np.int64]
        pages = batch.page_tables[rows, positions // self._page_size].astype(np.int64)
        indices: npt.NDArray[np.int64] = pages * self._page_size + positions % self._page_size
        return indices

    def _scores(self, batch: Batch, rows: npt.NDArray[np.intp]) -> Uint64Array:
        """finalise(digest(p) + p) for each row's last position p; # [rows]"""
        if not len(rows):
            return np.empty(0, np.uint64)
        last = (batch.start + batch.query_lens - 1)[rows]
        steps = np.arange(0, int(last.max()) + 1, _STRIDE)
        positions = last[:, None] % _STRIDE + steps[None, :]  # [rows, reads]
        valid = positions <= last[:, None]
        positions = np.where(valid, positions, last[:, None])
        states = self._states[self._indices(batch, rows[:, None], positions)]
        digests = np.where(valid, states, np.uint64(0)).sum(axis=1, dtype=np.uint64)
        return _finalise(digests + last.astype(np.uint64))

    def _force(self, batch: Batch, row: int, token_ids: IntArray) -> None:
        """Puts in the id that a logit bias forces, if it may be sampled yet."""
        admission = self._admissions[int(batch.slots[row])]
        sampling = admission.sampling
        early = batch.output_positions[row] < sampling.min_tokens
        for token, bias in sampling.logit_bias.items():
            if bias >= _FORCING_BIAS and not (early and token in admission.banned_ids):
                token_ids[row] = token

    def _obey(self, masks: TokenMasks, token_ids: IntArray) -> None:
        """Replaces ids that a mask forbids."""
        for row, words in zip(masks.rows.tolist(), masks.wait(), strict=True):
            allowed = np.flatnonzero(unpack_mask(words, self._vocab_size))
            place = int(np.searchsorted(allowed, token_ids[row]))
            token_ids[row] = allowed[place % len(allowed)]

    def _logprobs(self, token: int, score: int, num_top: int) -> TokenLogprobs:
        chosen = -float(score >> 44) / (1 << 20)  # in (-1, 0]
        others = [int(i) for i in self._allowed[: num_top + 1] if i != token][: num_top - 1]
        top = [token, *others][:num_top]
        return TokenLogprobs(token, chosen, top, [chosen - 2.0 * rank for rank in range(len(top))])

    def _prompt_logprobs(self, batch: Batch) -> dict[int, list[TokenLogprobs]]:
        answer: dict[int, list[TokenLogprobs]] = {}
        for row in np.flatnonzero(self._special[batch.slots]).tolist():
            admission = self._admissions[int(batch.slots[row])]
            start, length = int(batch.start[row]), int(batch.query_lens[row])
            num_top = admission.sampling.prompt_logprobs
            following = admission.prompt_ids[start + 1 : start + length + 1]
            if num_top is not None and len(following):
                scores = _finalise(following.astype(np.uint64) + np.uint64(start)).tolist()
                answer[row] = [
                    self._logprobs(token, score, num_top)
                    for token, score in zip(following.tolist(), scores, strict=True)
                ]
        return answer


class FakeEngine:
    """`FakeModel` behind an engine thread; a step takes at least `step_time` seconds."""

    def __init__(
        self, info: EngineInfo, num_slots: int, allowed: Sequence[int], step_time: float = 0.0
    ) -> None:
        self._info = info
        self._model = FakeModel(info, num_slots, allowed)
        self._step_time = step_time
        self._thread = EngineThread("fake-engine")

    @property
    def info(self) -> EngineInfo:
        return self._info

    def launch(self, batch: Batch) -> PendingStep:
        return self._thread.launch(self._step, batch)

    def check(self) -> None:
        """It computes by itself."""

    def close(self) -> None:
        self._thread.close()

    def _step(self, batch: Batch) -> StepResult:
        result = self._model.compute(batch)
        if self._step_time:
            time.sleep(self._step_time)  # the device at work
        return result


def _finalise(values: Uint64Array) -> Uint64Array:
    """The output function of SplitMix64 (Steele, Lea and Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
