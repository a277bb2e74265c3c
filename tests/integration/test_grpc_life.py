"""Cancelled and expired gRPC calls through a real fleet, by what its worker measured."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from protos import common_pb2, inference_pb2, inference_pb2_grpc
from tests.integration.served import ServedFleet
from tests.integration.test_abort_slo import Histogram
from tests.integration.test_fleet_life import assert_nothing_is_held
from tests.programs import eventually

_CALLS = 16
_GRACE = 0.05
_LONG = inference_pb2.GenerateRequest(
    text="Count for ever: 1, 2, 3,",
    options=inference_pb2.GenerationOptions(
        sampling=common_pb2.SamplingParams(max_tokens=4000, ignore_eos=True)
    ),
)


@pytest.fixture(scope="module")
def stub(stepping_fleet: ServedFleet) -> Iterator[inference_pb2_grpc.InferenceStub]:
    with grpc.insecure_channel(stepping_fleet.processes("gateway")[0]["address"]) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def _running(fleet: ServedFleet, count: int) -> None:
    eventually(
        lambda: fleet.total("worker", "vllm:num_requests_running") == count,
        timeout=60,
        what=f"{count} run",
    )


def _check_aborts(aborts: Histogram, steps: Histogram, count: int) -> None:
    """Every request was aborted, and its pages free within two steps and 50 ms."""
    counts = aborts.counts()
    assert counts[math.inf] == count
    bound = 2 * steps.interpolated(0.99) + _GRACE
    p99 = aborts.quantile(0.99)
    print(f"{count} aborts: p99 {p99 * 1000:g} ms at most, bound {bound * 1000:.1f} ms")
    assert p99 <= min(edge for edge in counts if edge >= bound)


def _histograms(fleet: ServedFleet) -> tuple[Histogram, Histogram]:
    return (
        Histogram(fleet, "shoal_abort_to_kv_free_seconds"),
        Histogram(fleet, "shoal_worker_step_seconds"),
    )


def test_cancelled_calls_free_their_pages(
    stepping_fleet: ServedFleet, stub: inference_pb2_grpc.InferenceStub
) -> None:
    aborts, steps = _histograms(stepping_fleet)
    calls: list[Any] = [stub.Generate(_LONG) for _ in range(_CALLS)]
    for call in calls:
        next(iter(call))
    _running(stepping_fleet, _CALLS)
    for call in calls:
        call.cancel()
    assert_nothing_is_held(stepping_fleet, timeout=60)
    _check_aborts(aborts, steps, _CALLS)


@pytest.mark.parametrize("by", ["ids", "call"])
def test_a_sessions_generations_free_their_pages(
    stepping_fleet: ServedFleet, stub: inference_pb2_grpc.InferenceStub, by: str
) -> None:
    aborts, steps = _histograms(stepping_fleet)
    starts = [inference_pb2.SessionStart(id=i, generate=_LONG) for i in range(_CALLS)]
    cancel = threading.Event()

    def requests() -> Iterator[inference_pb2.SessionRequest]:
        yield inference_pb2.SessionRequest(starts=starts)
        assert cancel.wait(60)
        if by == "ids":
            yield inference_pb2.SessionRequest(cancels=range(_CALLS))

    call: Any = stub.Session(requests())
    reader = iter(call)
    accepted: set[int] = set()
    while len(accepted) < _CALLS:
        accepted.update(update.id for update in next(reader).updates if update.pieces)
    _running(stepping_fleet, _CALLS)
    if by == "call":
        call.cancel()
    cancel.set()
    if by == "ids":
        codes = {
            update.id: update.error.code
            for response in reader
            for update in response.updates
            if update.WhichOneof("end")
        }
        assert codes == dict.fromkeys(range(_CALLS), common_pb2.ERROR_CODE_CANCELLED)
        assert call.code() is grpc.StatusCode.OK
    assert_nothing_is_held(stepping_fleet, timeout=60)
    _check_aborts(aborts, steps, _CALLS)


def test_a_deadline_comes_after_what_there_was(
    stepping_fleet: ServedFleet, stub: inference_pb2_grpc.InferenceStub
) -> None:
    call = stub.Generate(_LONG, timeout=3)
    texts: list[str] = []
    with pytest.raises(grpc.RpcError) as caught:
        texts.extend(piece.text for answer in call for piece in answer.pieces)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert 0 < len("".join(texts)) < 4000
    assert_nothing_is_held(stepping_fleet, timeout=60)


def test_a_deadline_of_a_session_is_its_generations_own(
    stepping_fleet: ServedFleet, stub: inference_pb2_grpc.InferenceStub
) -> None:
    short = inference_pb2.GenerateRequest()
    short.CopyFrom(_LONG)
    short.options.sampling.max_tokens = 5
    starts = [
        inference_pb2.SessionStart(id=1, generate=_LONG, deadline_ms=3000),
        inference_pb2.SessionStart(id=2, generate=short),
    ]
    texts = {1: "", 2: ""}
    ends: dict[int, inference_pb2.SessionUpdate] = {}
    for response in stub.Session(iter([inference_pb2.SessionRequest(starts=starts)])):
        for update in response.updates:
            texts[update.id] += "".join(piece.text for piece in update.pieces)
            if update.WhichOneof("end"):
                ends[update.id] = update
    assert ends[1].error.code == common_pb2.ERROR_CODE_DEADLINE_EXCEEDED
    assert texts[1].startswith(texts[2])
    assert len(texts[1]) > len(texts[2]) == ends[2].usage.completion_tokens == 5
    assert_nothing_is_held(stepping_fleet, timeout=60)
