"""A scheduler of the simplest kind, to drive an engine by hand in tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from services.worker.core import Admission, Batch, Engine, SamplingParams, StepResult

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Request:
    """A request's ids and the pages it holds."""

    prompt: list[int]
    sampling: SamplingParams = GREEDY
    banned_ids: tuple[int, ...] = ()
    outputs: list[int] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)
    slot: int = -1
    computed: int = 0
    pages: list[int] = field(default_factory=list)


class Driver:
    """Owns slots and pages of one engine; each `step` computes the rows it is given.

    Pages are handed out from both ends in turn, so that tables are not all ranges.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._pages = list(range(engine.info.num_pages))
        self._next_slot = 0
        self._step = 0

    def admit(self, request: Request) -> Admission:
        request.slot, self._next_slot = self._next_slot, self._next_slot + 1
        return Admission(
            request.slot,
            np.array(request.prompt, dtype=np.int32),
            np.array(request.outputs, dtype=np.int32),
            request.sampling,
            request.banned_ids,
        )

    def step(self, rows: Sequence[tuple[Request, int]], *, pooled: bool = False) -> StepResult:
        """Computes the next `count` tokens of each request.

        With `pooled`, the last sampled token is read from the token pool.
        """
        page_size, dummy = self.engine.info.page_size, self.engine.info.num_pages
        admissions = tuple(self.admit(request) for request, _ in rows if request.slot < 0)
        ids: list[int] = []
        start, lengths, sample, positions = [], [], [], []
        for request, count in rows:
            known = request.prompt + request.outputs
            piece = known[request.computed : request.computed + count]
            assert len(piece) == count
            if pooled and request.outputs and request.computed + count == len(known):
                piece[-1] = -1
            ids += piece
            start.append(request.computed)
            lengths.append(count)
            request.computed += count
            sample.append(request.computed == len(known))
            positions.append(len(request.outputs))
            while len(request.pages) * page_size < request.computed:
                request.pages.append(self._pages.pop(-(len(request.pages) % 2)))
        width = max(len(request.pages) for request, _ in rows) + 1
        tables = [r.pages + [dummy] * (width - len(r.pages)) for r, _ in rows]
        self._step += 1
        result = self.engine.launch(
            Batch(
                step=self._step,
                slots=np.array([request.slot for request, _ in rows], dtype=np.int32),
                start=np.array(start, dtype=np.int32),
                query_lens=np.array(lengths, dtype=np.int32),
                input_ids=np.array(ids, dtype=np.int32),
                page_tables=np.array(tables, dtype=np.int32),
                sample=np.array(sample, dtype=np.bool_),
                output_positions=np.array(positions, dtype=np.int32),
                admissions=admissions,
            )
        ).result()
        for (request, _), sampled, token in zip(rows, sample, result.token_ids, strict=True):
            if sampled:
                request.outputs.append(int(token))
            request.results.append(result)
        return result

    def generate(
        self, requests: Sequence[Request], max_tokens: int, *, chunk: int = 512, pooled: bool = True
    ) -> list[list[int]]:
        """Prefills each request in chunks, then decodes all together."""
        for request in requests:
            while request.computed < len(request.prompt):
                self.step([(request, min(chunk, len(request.prompt) - request.computed))])
        while any(len(request.outputs) < max_tokens for request in requests):
            rows = [(request, 1) for request in requests if len(request.outputs) < max_tokens]
            self.step(rows, pooled=pooled)
        return [request.outputs for request in requests]
