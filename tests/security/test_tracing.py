"""Traces of a real fleet, taken by a collector: one trace a request, over all services."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from protos import inference_pb2, inference_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc
from services.common import rpc
from services.common.errors import StartupError
from services.common.tracing import open_tracing, parse_trace
from tests.integration.served import ServedFleet
from tests.security.collector import Collector, SpanSeen
from tests.security.services import ServiceProcess

pytestmark = pytest.mark.integration

MARKER = "a-prompt-that-nobody-may-read"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
PHASES = {"encode", "queue", "prefill", "decode", "detokenize"}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def fleet(collector: Collector) -> Iterator[ServedFleet]:
    os.environ["OTEL_BSP_SCHEDULE_DELAY"] = "100"  # ms; inherited by the fleet
    try:
        with ServedFleet(
            *("--engine", "fake", "--model", "byte", "--fake-step-ms", "2", "--workers", "2"),
            *("--log-level", "debug", "--log-format", "json"),
            f"--otlp-endpoint={collector.endpoint}",
        ) as served:
            yield served
    finally:
        del os.environ["OTEL_BSP_SCHEDULE_DELAY"]


def _num_running(entry: dict[str, Any]) -> float:
    """Requests in a worker."""
    transport = httpx.HTTPTransport(uds=entry["admin_address"].removeprefix("unix:"))
    with httpx.Client(transport=transport, base_url="http://admin") as client:
        lines = client.get("/metrics").text.splitlines()
    values = [float(line.split()[-1]) for line in lines if line.startswith("shoal_worker_handles")]
    return sum(values)


def _of_trace(spans: list[SpanSeen], trace_id: str) -> list[SpanSeen]:
    return [span for span in spans if span.trace_id == trace_id]


def _wait_for_trace(collector: Collector, trace_id: str, count: int) -> list[SpanSeen]:
    """A trace's spans, once there are that many."""
    spans = collector.wait_for(lambda spans: len(_of_trace(spans, trace_id)) >= count)
    return _of_trace(spans, trace_id)


def _one(spans: list[SpanSeen], name: str) -> SpanSeen:
    (span,) = [span for span in spans if span.name == name]
    return span


def test_one_trace_over_all_services(fleet: ServedFleet, collector: Collector) -> None:
    answer = httpx.post(
        f"{fleet.url}/v1/chat/completions",
        json={"model": "byte", "messages": [{"role": "user", "content": MARKER}], "max_tokens": 5},
        headers={
            "traceparent": f"00-{TRACE}-{PARENT}-01",
            "tracestate": "vendor=7",
            "x-request-id": "of-interest",
        },
        timeout=60,
    )
    assert answer.status_code == 200
    usage = answer.json()["usage"]
    spans = _wait_for_trace(collector, TRACE, 7)
    server = _one(spans, "POST /v1/chat/completions")
    assert server.parent_id == PARENT
    assert server.kind == 2  # a server's
    assert server.attributes["http.response.status_code"] == 200
    request = _one(spans, "chat byte")
    assert request.parent_id == server.span_id
    assert request.attributes["shoal.request_id"] == "of-interest"
    assert request.attributes["gen_ai.request.model"] == "byte"
    assert request.attributes["gen_ai.usage.cache_read.input_tokens"] == 0
    assert request.attributes["shoal.resumes"] == 0
    assert {span.name for span in spans if span.parent_id == request.span_id} == PHASES
    assert {span.name: span.service for span in spans if span.name in PHASES} == {
        "encode": "shoal-tokenizer",
        "queue": "shoal-worker",
        "prefill": "shoal-worker",
        "decode": "shoal-worker",
        "detokenize": "shoal-detokenizer",
    }
    assert {server.service, request.service} == {"shoal-gateway"}
    assert request.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert request.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 5
    assert request.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert _one(spans, "encode").attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert _one(spans, "decode").attributes["gen_ai.usage.output_tokens"] == 5
    for phase in ("queue", "prefill", "decode"):
        assert _one(spans, phase).attributes["shoal.request_id"] == "of-interest"
    queue, prefill, decode = (_one(spans, name) for name in ("queue", "prefill", "decode"))
    assert queue.start <= queue.end <= prefill.start <= prefill.end <= decode.start <= decode.end
    assert not any(span.failed for span in spans)
    (line,) = [line for line in fleet.log if "a request ended" in line and "of-interest" in line]
    told = json.loads(line)
    assert (told["service"], told["trace_id"]) == ("gateway", TRACE)


def test_a_call_without_a_context_is_one_new_trace(
    fleet: ServedFleet, collector: Collector
) -> None:
    """Several prompts and choices too."""
    request_id = "two prompts of two choices"
    answer = httpx.post(
        f"{fleet.url}/v1/completions",
        json={"prompt": ["a", "b"], "n": 2, "max_tokens": 2},
        headers={"x-request-id": request_id},
        timeout=60,
    )
    assert answer.status_code == 200

    def mine(spans: list[SpanSeen], name: str) -> list[SpanSeen]:
        return [
            span
            for span in spans
            if span.name == name and span.attributes.get("shoal.request_id") == request_id
        ]

    spans = collector.wait_for(
        lambda spans: len(mine(spans, "decode")) == 4 and len(mine(spans, "text_completion")) == 2
    )
    requests = mine(spans, "text_completion")
    assert len({span.trace_id for span in requests}) == 1
    assert {span.trace_id for span in mine(spans, "decode")} == {requests[0].trace_id}


async def test_a_grpc_call_is_a_server_span_over_the_same_parts(
    fleet: ServedFleet, collector: Collector
) -> None:
    """The context comes in the metadata."""
    trace_id = "d" * 32
    request = inference_pb2.GenerateRequest(text=MARKER)
    request.options.sampling.max_tokens = 3
    async with rpc.open_channel(fleet.processes("gateway")[0]["address"]) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        metadata = (("traceparent", f"00-{trace_id}-{PARENT}-01"),)
        async for _ in stub.Generate(request, metadata=metadata, timeout=60):
            pass
        request.options.model = "no such model"
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Generate(request, metadata=metadata, timeout=60).read()
    spans = _wait_for_trace(collector, trace_id, 9)
    calls = [span for span in spans if span.name == "shoal.v1.Inference/Generate"]
    assert {(span.kind, span.parent_id, span.failed) for span in calls} == {(2, PARENT, False)}
    codes = {span.attributes["rpc.grpc.status_code"]: span for span in calls}
    assert sorted(codes) == [0, 5]  # OK, NOT_FOUND
    generation = _one(
        [span for span in spans if span.parent_id == codes[0].span_id], "text_completion"
    )
    assert {span.name for span in spans if span.parent_id == generation.span_id} == PHASES
    assert {span.service for span in spans} == {
        f"shoal-{service}" for service in ("gateway", "tokenizer", "worker", "detokenizer")
    }


async def test_each_generation_of_a_grpc_session_is_a_server_span_of_its_own_trace(
    fleet: ServedFleet, collector: Collector
) -> None:
    traces = ["e" * 32, "f" * 32]
    async with rpc.open_channel(fleet.processes("gateway")[0]["address"]) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Session(timeout=60)  # type: ignore[call-arg]
        for number, trace_id in enumerate(traces):
            start = inference_pb2.SessionStart(
                id=number,
                generate=inference_pb2.GenerateRequest(text=MARKER),
                traceparent=f"00-{trace_id}-{PARENT}-01",
            )
            start.generate.options.sampling.max_tokens = 2
            await call.write(inference_pb2.SessionRequest(starts=[start]))
        await call.done_writing()
        while (await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # its stubs lack it
            pass
    for trace_id in traces:
        spans = _wait_for_trace(collector, trace_id, 7)
        server = _one(spans, "shoal.v1.Inference/Session")
        assert (server.kind, server.parent_id) == (2, PARENT)
        assert server.attributes["rpc.grpc.status_code"] == 0
        assert _one(spans, "text_completion").parent_id == server.span_id


def test_a_resumed_request_keeps_its_trace(fleet: ServedFleet, collector: Collector) -> None:
    trace_id = "a" * 32
    headers = {"traceparent": f"00-{trace_id}-{PARENT}-01"}
    body = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream(
        "POST", f"{fleet.url}/v1/completions", json=body, headers=headers, timeout=60
    ) as response:
        lines = response.iter_lines()
        next(lines)
        (busy,) = [entry for entry in fleet.processes("worker") if _num_running(entry)]
        os.kill(busy["pid"], signal.SIGKILL)
        text = list(lines)
    assert "data: [DONE]" in text

    def ended(spans: list[SpanSeen]) -> bool:
        return {"text_completion", "decode"} <= {s.name for s in _of_trace(spans, trace_id)}

    spans = _of_trace(collector.wait_for(ended), trace_id)  # each service sends when it likes
    request = _one(spans, "text_completion")
    assert request.attributes["gen_ai.usage.output_tokens"] == 400
    assert request.attributes["shoal.resumes"] == 1
    phases = [span for span in spans if span.name in PHASES]
    assert {span.parent_id for span in phases} == {request.span_id}
    assert len([span for span in phases if span.name == "decode"]) == 1  # the first died unsent
    resumed = _one(phases, "decode").attributes["gen_ai.usage.output_tokens"]
    assert 0 < resumed < 400


def test_refusals_and_lost_clients_are_failed_spans(
    fleet: ServedFleet, collector: Collector
) -> None:
    trace_id = "b" * 32
    headers = {"traceparent": f"00-{trace_id}-{PARENT}-01"}
    body = {"prompt": [5] * 100_000, "max_tokens": 5}
    answer = httpx.post(f"{fleet.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 400
    spans = collector.wait_for(lambda spans: len(_of_trace(spans, trace_id)) >= 2)
    assert _one(_of_trace(spans, trace_id), "text_completion").failed
    assert not _one(_of_trace(spans, trace_id), "POST /v1/completions").failed  # it was answered

    trace_id = "c" * 32
    headers = {"traceparent": f"00-{trace_id}-{PARENT}-01"}
    body = {"prompt": "x", "max_tokens": 5000, "ignore_eos": True, "stream": True}
    with httpx.stream(
        "POST", f"{fleet.url}/v1/completions", json=body, headers=headers, timeout=60
    ) as response:
        next(response.iter_lines())
    names = {"text_completion", "decode", "detokenize", "POST /v1/completions"}
    spans = collector.wait_for(
        lambda spans: names <= {span.name for span in _of_trace(spans, trace_id)}
    )
    assert all(_one(_of_trace(spans, trace_id), name).failed for name in ("text_completion",))


def test_no_span_has_text(fleet: ServedFleet, collector: Collector) -> None:
    assert collector.spans
    assert MARKER.encode() not in collector.raw


async def test_a_collector_that_is_away_delays_nothing(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/t.sock"
    with ServiceProcess(
        "tokenizer", "--model=byte", f"--address={address}", "--otlp-endpoint=http://127.0.0.1:9"
    ) as tokenizer:
        tokenizer.wait_for_line('"message": "ready"')
        async with rpc.open_channel(address) as channel:
            stub = tokenizer_pb2_grpc.TokenizerStub(channel)
            for _ in range(100):
                await stub.Encode(tokenizer_pb2.EncodeRequest(text="abc"), timeout=30)
        assert tokenizer.stop() == 0
        lines = [json.loads(line) for line in tokenizer.log]  # OpenTelemetry's complaints, too
        assert {line["service"] for line in lines} == {"tokenizer"}
        assert [line for line in lines if line["logger"].startswith("opentelemetry")]


def test_off_is_off() -> None:
    """No flag and no variable: OpenTelemetry is not even imported."""
    code = (
        "import sys, services.gateway.app, services.worker.__main__, services.tokenizer.__main__\n"
        "from services.common.tracing import open_tracing\n"
        "assert not open_tracing('gateway', '').enabled\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


@pytest.mark.parametrize(
    ("traceparent", "good"),
    [
        (f"00-{TRACE}-{PARENT}-01", True),
        (f"00-{TRACE}-{PARENT}-00", True),
        (f"cc-{TRACE}-{PARENT}-01", True),  # a later version
        (f"ff-{TRACE}-{PARENT}-01", False),
        (f"00-{'0' * 32}-{PARENT}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"00-{TRACE.upper()}-{PARENT}-01", False),
        (f"00-{TRACE}-{PARENT}-01\n", False),
        ("", False),
        ("x" * 10_000, False),
    ],
)
def test_a_malformed_context_is_none(traceparent: str, good: bool) -> None:
    assert bool(parse_trace(traceparent, "a=1").traceparent) == good
    assert parse_trace(f"00-{TRACE}-{PARENT}-01", "a=\x7f").tracestate == ""
    assert parse_trace(f"00-{TRACE}-{PARENT}-01", "x" * 513).tracestate == ""


@pytest.mark.parametrize("endpoint", ["localhost:4317", "ftp://x"])
def test_an_endpoint_without_a_scheme_is_refused(endpoint: str) -> None:
    with pytest.raises(StartupError, match="does not begin with http"):
        open_tracing("gateway", endpoint)
