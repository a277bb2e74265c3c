"""The sampler: distributions, filters, edits and log-probabilities."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pytest
import torch

from services.worker.core import Admission, SamplingParams, TokenLogprobs
from services.worker.engine.sampler import Sampler
from services.worker.native.kernels import Kernels

VOCAB = 1000
DRAWS = 4000


class SamplerFactory(Protocol):
    def __call__(
        self,
        *rows: SamplingParams,
        vocab: int = VOCAB,
        prompt: list[int] | None = None,
        outputs: list[int] | None = None,
        banned: tuple[int, ...] = (),
    ) -> Sampler: ...


def sampler_factory(kernels: Kernels | None) -> SamplerFactory:
    """Makes samplers whose slot i holds the parameters of rows[i]."""

    def make(
        *rows: SamplingParams,
        vocab: int = VOCAB,
        prompt: list[int] | None = None,
        outputs: list[int] | None = None,
        banned: tuple[int, ...] = (),
    ) -> Sampler:
        sampler = Sampler(len(rows), vocab, kernels=kernels)
        for slot, params in enumerate(rows):
            ids = (np.array(prompt or [1], np.int32), np.array(outputs or [], np.int32))
            sampler.admit(Admission(slot, *ids, params, banned))
        return sampler

    return make


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    loaded = Kernels.load()
    if loaded is None:
        pytest.skip("no C++ compiler")
    return loaded


@pytest.fixture(params=["torch", "native"])
def make_sampler(request: pytest.FixtureRequest) -> SamplerFactory:
    native = request.param == "native"
    return sampler_factory(request.getfixturevalue("kernels") if native else None)


def sample(
    sampler: Sampler, logits: torch.Tensor, position: int = 0, slots: list[int] | None = None
) -> tuple[list[int], dict[int, TokenLogprobs]]:
    rows = slots if slots is not None else list(range(len(logits)))
    positions = np.full(len(rows), position, np.int32)
    tokens, logprobs = sampler.sample(logits.clone(), np.array(rows, np.int32), positions)
    if logprobs is None:
        return tokens.tolist(), {}
    rows_reported, report = logprobs
    return tokens.tolist(), dict(zip(rows_reported.tolist(), report.entries(), strict=True))


def draw_many(
    make_sampler: SamplerFactory, params: SamplingParams, logits: torch.Tensor, count: int
) -> npt.NDArray[np.int64]:
    """How often each id is drawn at positions 0 .. count - 1, as rows of one batch."""
    sampler = make_sampler(params, vocab=len(logits))
    slots, positions = np.zeros(count, np.int32), np.arange(count, dtype=np.int32)
    tokens, _ = sampler.sample(logits.repeat(count, 1), slots, positions)
    return np.bincount(tokens.numpy(), minlength=len(logits))


def chi_square(counts: npt.NDArray[np.int64], probs: torch.Tensor) -> tuple[float, float]:
    """The statistic over ids expected five times or more, and its value at p = 0.0001."""
    expected = probs.numpy() * counts.sum()
    common = expected >= 5
    rest_counts, rest = counts[~common].sum(), expected[~common].sum()
    statistic = (((counts - expected) ** 2)[common] / expected[common]).sum()
    if rest >= 5:
        statistic += (rest_counts - rest) ** 2 / rest
    freedom = common.sum() - (0 if rest >= 5 else 1)
    # Wilson and Hilferty's approximation of the chi-square quantile.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * np.sqrt(2 / (9 * freedom))) ** 3
    return float(statistic), float(limit)


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 2.5


def test_greedy_takes_the_likeliest(make_sampler: SamplerFactory, logits: torch.Tensor) -> None:
    sampler = make_sampler(SamplingParams(temperature=0), SamplingParams(temperature=1e-6))
    tokens, logprobs = sample(sampler, torch.stack([logits, -logits]))
    assert tokens == [int(logits.argmax()), int(logits.argmin())]
    assert not logprobs


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_softmax(
    make_sampler: SamplerFactory, logits: torch.Tensor, temperature: float
) -> None:
    counts = draw_many(make_sampler, SamplingParams(temperature=temperature, seed=5), logits, DRAWS)
    statistic, limit = chi_square(counts, (logits / temperature).softmax(0))
    assert statistic < limit


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 20},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 50, "top_p": 0.7, "min_p": 0.02},
        {"top_p": 0.999, "temperature": 2.0},  # keeps more than the first candidates
        {"top_k": 900, "temperature": 2.0},
    ],
)
def test_filtered_draws_follow_the_renormalised_softmax(
    make_sampler: SamplerFactory, logits: torch.Tensor, filters: dict[str, Any]
) -> None:
    params = SamplingParams(seed=7, **filters)
    counts = draw_many(make_sampler, params, logits, DRAWS)
    probs = filtered_probs(logits, params)
    assert not counts[probs.numpy() == 0].any()
    statistic, limit = chi_square(counts, probs)
    assert statistic < limit


def filtered_probs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The definition, by a full sort in float64."""
    order = logits.argsort(descending=True)
    probs = (logits[order].double() / params.temperature).softmax(0)
    if params.top_k:
        probs[params.top_k :] = 0
    probs /= probs.sum()
    probs[(probs.cumsum(0) - probs) >= params.top_p] = 0
    probs[probs < params.min_p * probs[0]] = 0
    return torch.zeros_like(probs).scatter_(0, order, probs / probs.sum()).float()


def test_a_draw_depends_on_seed_and_position_only(
    make_sampler: SamplerFactory, logits: torch.Tensor
) -> None:
    seeded = SamplingParams(seed=42, temperature=0.9)
    filtered = dataclasses.replace(seeded, top_p=0.9)
    others = [SamplingParams(temperature=0), SamplingParams(seed=9), SamplingParams(top_k=3)]
    for params in (seeded, filtered):
        alone = [sample(make_sampler(params), logits[None], p)[0][0] for p in range(20)]
        company = make_sampler(*others, params, *others)
        batch = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(2))
        batch[3] = logits
        assert [sample(company, batch, p)[0][3] for p in range(20)] == alone
        assert len(set(alone)) > 5
        other = make_sampler(dataclasses.replace(params, seed=43))
        assert [sample(other, logits[None], p)[0][0] for p in range(20)] != alone


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 + 5])
def test_any_integer_is_a_seed(
    make_sampler: SamplerFactory, logits: torch.Tensor, seed: int
) -> None:
    assert 0 <= sample(make_sampler(SamplingParams(seed=seed)), logits[None])[0][0] < VOCAB


def test_top_k_of_one_is_greedy_even_at_a_high_temperature(
    make_sampler: SamplerFactory, logits: torch.Tensor
) -> None:
    for position in range(50):
        sampler = make_sampler(SamplingParams(top_k=1, temperature=2.0, seed=position))
        assert sample(sampler, logits[None], position)[0] == [int(logits.argmax())]


def test_presence_and_frequency_count_outputs_only(make_sampler: SamplerFactory) -> None:
    logits = torch.tensor([[3.0, 2.9, 2.0, 0.0]])
    presence = SamplingParams(temperature=0, presence_penalty=0.5)
    assert sample(make_sampler(presence, vocab=4, prompt=[0, 0]), logits)[0] == [0]
    assert sample(make_sampler(presence, vocab=4, outputs=[0]), logits)[0] == [1]
    frequency = SamplingParams(temperature=0, frequency_penalty=0.06)
    sampler = make_sampler(frequency, vocab=4)
    assert [sample(sampler, logits, p)[0][0] for p in range(5)] == [0, 0, 1, 0, 1]


def test_repetition_counts_the_prompt_and_spares_signs(make_sampler: SamplerFactory) -> None:
    repetition = SamplingParams(temperature=0, repetition_penalty=2.0)
    sampler = make_sampler(repetition, vocab=3, prompt=[0])
    assert sample(sampler, torch.tensor([[3.0, 2.0, -1.0]]))[0] == [1]
    assert sample(sampler, torch.tensor([[-1.0, -1.5, -1.8]]), 1)[0] == [2]


def test_a_slot_forgets_its_last_holder(make_sampler: SamplerFactory) -> None:
    penalized = SamplingParams(temperature=0, frequency_penalty=2.0)
    sampler = make_sampler(penalized, vocab=3, outputs=[0, 0])
    logits = torch.tensor([[3.0, 2.0, 0.0]])
    assert sample(sampler, logits)[0] == [1]
    empty = np.array([], np.int32)
    for params in (penalized, SamplingParams(temperature=0)):
        sampler.admit(Admission(0, np.array([1], np.int32), empty, params))
        assert sample(sampler, logits)[0] == [0]


def test_logit_bias_forces_and_forbids_and_unknown_ids_do_nothing(
    make_sampler: SamplerFactory, logits: torch.Tensor
) -> None:
    best = int(logits.argmax())
    params = SamplingParams(temperature=0, logit_bias={5: 100.0, VOCAB + 3: 100.0})
    assert sample(make_sampler(params), logits[None])[0] == [5]
    forbid = SamplingParams(temperature=0, logit_bias={best: -100.0})
    assert sample(make_sampler(forbid), logits[None])[0] == [int(logits.argsort()[-2])]


def test_banned_ids_wait_for_min_tokens(make_sampler: SamplerFactory, logits: torch.Tensor) -> None:
    best = int(logits.argmax())
    params = SamplingParams(temperature=0, min_tokens=3, logit_bias={best: 100.0})
    sampler = make_sampler(params, banned=(best, VOCAB + 1))
    tokens = [sample(sampler, logits[None], position)[0][0] for position in range(5)]
    assert [token == best for token in tokens] == [False, False, False, True, True]


def test_logprobs_are_of_the_raw_distribution(
    make_sampler: SamplerFactory, logits: torch.Tensor
) -> None:
    params = SamplingParams(temperature=0.7, seed=3, logit_bias={5: 100.0}, logprobs=4)
    plain = SamplingParams(temperature=0)
    bare = dataclasses.replace(plain, logprobs=0)
    tokens, logprobs = sample(make_sampler(plain, params, bare), logits.repeat(3, 1))
    expected = logits.log_softmax(0)
    assert set(logprobs) == {1, 2}
    assert tokens[1] == logprobs[1].token_id == 5
    assert logprobs[1].logprob == pytest.approx(float(expected[5]), abs=1e-5)
    values, ids = expected.topk(4)
    assert logprobs[1].top_token_ids == ids.tolist()
    assert logprobs[1].top_logprobs == pytest.approx(values.tolist(), abs=1e-5)
    assert list(logprobs[2].top_token_ids) == []


PENALISED = {"presence_penalty": 0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.3}


@pytest.mark.parametrize("scale", [0.3, 3.0, 30.0])
def test_native_kernels_choose_what_torch_chooses(kernels: Kernels, scale: float) -> None:
    vocab = 4999  # not a whole number of vectors
    rows = [
        SamplingParams(seed=seed, temperature=temperature, **filters)
        for seed, temperature in enumerate((0.0, 0.4, 1.0, 2.5))
        for filters in (
            {},
            {"top_k": 7},
            {"top_p": 0.6},
            {"top_p": 0.999},
            {"min_p": 0.2},
            {"top_k": 3000, "top_p": 0.95, "min_p": 0.001},
            PENALISED,
        )
    ]
    logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(3)) * scale
    logits[:, ::17] = float("-inf")
    history = {"vocab": vocab, "prompt": [1, 2, 2, 4998], "outputs": [2, 9, 9, 40]}
    native, plain = (sampler_factory(k)(*rows, **history) for k in (kernels, None))  # type: ignore[arg-type]
    for position in range(6):
        assert sample(native, logits, position) == sample(plain, logits, position)


def test_native_kernels_survive_logits_that_are_no_numbers(kernels: Kernels) -> None:
    params = [SamplingParams(temperature=0), SamplingParams(seed=1), SamplingParams(top_p=0.5)]
    sampler = sampler_factory(kernels)(*params)
    for value in (float("nan"), float("inf"), float("-inf")):
        some = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4))
        first, last = some.clone(), some.clone()
        first[:, 10:500], last[:, 900:] = value, value
        for logits in (first, last, torch.full((3, VOCAB), value)):
            assert all(0 <= token < VOCAB for token in sample(sampler, logits)[0])
        if value != value or value < 0:  # what is a number is still compared
            assert sample(sampler, last)[0][0] == int(some[0, :900].argmax())
