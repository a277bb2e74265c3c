"""The draw by thresholds against the draw by sorting, which is what CUDA and CPU rows get."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine.draw import row_keys
from services.worker.engine.filters import DrawParams, draw_filtered, draw_top_k
from services.worker.engine.thresholds import draw_thresholded, kept_by_filters, ordered_bits

VOCAB = 1500


def params_of(rows: list[tuple[float, int, float, float]], seed: int) -> DrawParams:
    """rows: (temperature, top_k, top_p, min_p)"""
    seeds = np.arange(len(rows), dtype=np.uint64) + np.uint64(seed)
    low, high = row_keys(seeds, np.zeros(len(rows), np.uint64))
    temperature, top_k, top_p, min_p = (list(column) for column in zip(*rows, strict=True))
    return DrawParams(
        temperature=torch.tensor(temperature)[:, None],
        top_k=torch.tensor([k or VOCAB for k in top_k])[:, None],
        top_p=torch.tensor(top_p)[:, None],
        log_min_p=torch.tensor(min_p)[:, None].log(),
        key_low=torch.from_numpy(low)[:, None],
        key_high=torch.from_numpy(high)[:, None],
    )


row = st.tuples(
    st.floats(0.3, 2.0),
    st.sampled_from([0, 1, 2, 40, 700, VOCAB]),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    st.sampled_from([0.0, 0.001, 0.2]),
)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(row, min_size=1, max_size=6), seed=st.integers(0, 1 << 30))
def test_thresholds_keep_what_sorting_keeps(
    rows: list[tuple[float, int, float, float]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), VOCAB, generator=generator) * 3
    params = params_of(rows, seed)
    scores = logits / params.temperature
    kept = kept_by_filters(scores, params)
    order = scores.argsort(dim=1, descending=True, stable=True)
    for index, (_, top_k, top_p, min_p) in enumerate(rows):
        ranked = scores[index, order[index]].double()
        ranked[top_k or VOCAB :] = float("-inf")
        probs = ranked.softmax(0)
        before = probs.cumsum(0) - probs
        expected = (probs > 0) & (before < top_p) & (probs >= min_p * probs[0])
        got = kept[index, order[index]]
        # Where a sum comes within rounding of its share, either answer is right.
        unclear = (before - top_p).abs() < 1e-5
        unclear |= (probs / probs[0] - min_p).abs() < 1e-6
        assert bool((got == expected)[~unclear & (probs > 1e-30)].all())
        assert bool(got[0])


def test_every_way_draws_the_same_token() -> None:
    logits = torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    rows = [(0.8, k, 0.95, 0.01) for k in (0, 5, 40, 512) * 16]
    params = params_of(rows, 9)
    sorted_draw = draw_filtered(logits, params)
    assert draw_thresholded(logits, params).tolist() == sorted_draw.tolist()
    few = torch.tensor([bool(k) for _, k, _, _ in rows])
    assert draw_top_k(logits, params)[few].tolist() == sorted_draw[few].tolist()
    assert len(set(sorted_draw.tolist())) > 30


@pytest.mark.parametrize("values", [[-3.5, -1e-30, -0.0, 0.0, 1e-30, 2.0], [-np.inf, 0.0, np.inf]])
def test_bits_are_in_the_order_of_the_numbers(values: list[float]) -> None:
    bits = ordered_bits(torch.tensor(values)).tolist()
    assert bits == sorted(bits)
