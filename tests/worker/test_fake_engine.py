"""The fake engine: its tokens are the oracle's, and wrong pages make wrong tokens."""

from __future__ import annotations

import numpy as np
import pytest

from services.worker.config import WorkerConfig
from services.worker.core import Admission, Batch, EngineInfo, SamplingParams
from services.worker.engine import fake
from services.worker.engine.fake import FakeModel, allowed_ids, fake_tokens

ALLOWED = list(range(32, 127))


def make_model(page_size: int = 4) -> FakeModel:
    info = EngineInfo("fake", "", 259, 512, page_size, 64, 64, frozenset({257}))
    return FakeModel(info, 4, ALLOWED)


def one_row(
    start: int,
    ids: list[int],
    pages: list[int],
    *,
    sample: bool = True,
    output_position: int = 0,
    admission: Admission | None = None,
) -> Batch:
    return Batch(
        step=1,
        slots=np.array([2], np.int32),
        start=np.array([start], np.int32),
        query_lens=np.array([len(ids)], np.int32),
        input_ids=np.array(ids, np.int32),
        page_tables=np.array([pages], np.int32),
        sample=np.array([sample]),
        output_positions=np.array([output_position], np.int32),
        admissions=(admission,) if admission else (),
    )


def admit(prompt: list[int], **sampling: object) -> Admission:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return Admission(2, np.array(prompt, np.int32), np.empty(0, np.int32), params, (257,))


@pytest.mark.parametrize("chunks", [[10], [3, 7], [1] * 10, [4, 4, 2]])
def test_chunks_and_decode_give_the_oracle_s_tokens(chunks: list[int]) -> None:
    model, pages, prompt = make_model(), [9, 3, 40, 7, 1], list(range(100, 110))
    start, admission, tokens = 0, admit(prompt), list[int]()
    for length in chunks:
        end = start + length
        batch = one_row(
            start,
            prompt[start:end],
            pages,
            sample=end == 10,
            admission=None if start else admission,
        )
        tokens.append(int(model.compute(batch).token_ids[0]))
        start = end
    assert tokens[:-1] == [-1] * (len(chunks) - 1)
    tokens = tokens[-1:]
    while len(tokens) < 8:
        batch = one_row(start, [-1], pages, output_position=len(tokens))
        tokens.append(int(model.compute(batch).token_ids[0]))
        start += 1
    assert tokens == fake_tokens(prompt, 8, ALLOWED)


@pytest.mark.parametrize("wrong_page", [0, 1, 2])
def test_a_wrong_page_anywhere_changes_the_tokens(wrong_page: int) -> None:
    prompt = list(range(100, 112))
    expected = fake_tokens(prompt, 20, ALLOWED)
    model, pages = make_model(), [9, 3, 40, 7, 8, 11, 12, 13]
    tokens = [int(model.compute(one_row(0, prompt, pages, admission=admit(prompt))).token_ids[0])]
    pages[wrong_page] = 50
    for position in range(12, 31):
        batch = one_row(position, [-1], pages, output_position=len(tokens))
        tokens.append(int(model.compute(batch).token_ids[0]))
    assert tokens != expected


def test_a_bias_of_100_forces_an_id_once_min_tokens_allow_it() -> None:
    prompt = [1, 2, 3]
    admission = admit(prompt, logit_bias={257: 100.0}, min_tokens=1)
    model, pages = make_model(), [0, 1]
    first = model.compute(one_row(0, prompt, pages, admission=admission))
    assert first.token_ids[0] == fake_tokens(prompt, 1, ALLOWED)[0]
    assert model.compute(one_row(3, [-1], pages, output_position=1)).token_ids[0] == 257


def test_logprobs_are_the_same_each_time_and_name_the_successors() -> None:
    prompt = [40, 50, 60, 70]
    admission = admit(prompt, logprobs=2, prompt_logprobs=1)
    results = [
        make_model().compute(one_row(0, prompt, [0, 1], admission=admission)) for _ in range(2)
    ]
    assert results[0].logprobs == results[1].logprobs
    entry = results[0].logprobs[0]
    assert entry.token_id == results[0].token_ids[0]
    assert entry.logprob <= 0
    assert len(entry.top_token_ids) == len(entry.top_logprobs) == 2
    assert [e.token_id for e in results[0].prompt_logprobs[0]] == [50, 60, 70]


def test_the_byte_vocabulary_gives_printable_text() -> None:
    assert allowed_ids("byte") == ALLOWED


def test_load_resolves_what_the_configuration_leaves_open() -> None:
    phases: list[str] = []
    config = WorkerConfig(model="byte", engine="fake", num_pages=10, page_size=16)
    engine = fake.load(config, lambda phase, done, total: phases.append(phase))
    try:
        assert engine.info.max_model_len == 160
        assert engine.info.max_prefill_tokens == 512
        assert engine.info.eos_token_ids == {257}
        assert phases
    finally:
        engine.close()
    other = fake.load(WorkerConfig(model="byte", engine="fake", page_size=1), lambda *_: None)
    other.close()
    assert other.info.fingerprint == engine.info.fingerprint
    assert other.info.num_pages == 16384
