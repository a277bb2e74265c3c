"""Messages that are well-formed and wrong, to every gRPC service of a fleet.

Each is refused for itself, with the field at fault named on the public API, and harms
neither its neighbours on the stream nor the stream beside.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from protos import common_pb2, inference_pb2, inference_pb2_grpc, tokenizer_pb2, worker_pb2
from tests.integration.hostile import GENERATE, Victims, code_of, raw_call, session_of


def options_of(**fields: Any) -> inference_pb2.GenerationOptions:
    return inference_pb2.GenerationOptions(**fields)


def sampled(**fields: Any) -> inference_pb2.GenerateRequest:
    sampling = common_pb2.SamplingParams(**fields)
    return inference_pb2.GenerateRequest(text="x", options=options_of(sampling=sampling))


def with_ids(*ids: int) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(token_ids=common_pb2.TokenIds(ids=ids))


NAN, INFINITY = float("nan"), float("inf")
HUGE = (1 << 32) - 1
WRONG_GENERATES: tuple[tuple[inference_pb2.GenerateRequest, str], ...] = (
    (inference_pb2.GenerateRequest(), "prompt"),
    (with_ids(), "prompt"),
    (with_ids(1, 259), "prompt"),
    (with_ids(HUGE), "prompt"),
    (inference_pb2.GenerateRequest(text="x", options=options_of(n=0)), "n"),
    (inference_pb2.GenerateRequest(text="x", options=options_of(n=129)), "n"),
    (inference_pb2.GenerateRequest(text="x", options=options_of(n=HUGE)), "n"),
    (inference_pb2.GenerateRequest(text="x", options=options_of(priority=-(1 << 31))), "priority"),
    (sampled(temperature=NAN), "temperature"),
    (sampled(temperature=INFINITY), "temperature"),
    (sampled(temperature=-1), "temperature"),
    (sampled(top_p=0), "top_p"),
    (sampled(top_p=NAN), "top_p"),
    (sampled(top_k=-2), "top_k"),
    (sampled(min_p=2), "min_p"),
    (sampled(repetition_penalty=0), "repetition_penalty"),
    (sampled(max_tokens=0), "max_tokens"),
    (sampled(max_tokens=HUGE), "max_tokens"),
    (sampled(min_tokens=9, max_tokens=8), "min_tokens"),
    (sampled(logprobs=21), "logprobs"),
    (sampled(logit_bias={HUGE: 1}), "logit_bias"),
    (sampled(logit_bias={1: NAN}), "logit_bias"),
    (sampled(logit_bias=dict.fromkeys(range(100_000), 1.0)), "logit_bias"),
    (sampled(stop_token_ids=[HUGE]), "stop_token_ids"),
    (sampled(stop_token_ids=range(100_000)), "stop_token_ids"),
    (sampled(grammar=common_pb2.Grammar()), "grammar"),
    (
        inference_pb2.GenerateRequest(
            text="x", options=options_of(text=common_pb2.TextOptions(stop=[""]))
        ),
        "stop",
    ),
    (
        inference_pb2.GenerateRequest(
            text="x", options=options_of(text=common_pb2.TextOptions(stop=["a"] * 100_000))
        ),
        "stop",
    ),
)


def _refusal(call: Iterable[object]) -> tuple[grpc.StatusCode, dict[str, Any]]:
    """How a call was refused, with its rich details by name."""
    with pytest.raises(grpc.RpcError) as caught:
        for _ in call:
            pass
    error: Any = caught.value
    status = rpc_status.from_call(error)
    assert status is not None
    assert status.message == error.details()
    details = {}
    for packed in status.details:
        name = packed.TypeName().rpartition(".")[2]
        details[name] = getattr(error_details_pb2, name).FromString(packed.value)
    return error.code(), details


def test_wrong_requests_name_the_field(victims: Victims) -> None:
    with victims.unharmed(), victims.channel("gateway") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for request, field in WRONG_GENERATES:
            code, details = _refusal(stub.Generate(request, timeout=60))
            assert code is grpc.StatusCode.INVALID_ARGUMENT, str(request)[:200]
            assert details["BadRequest"].field_violations[0].field == field
        for count in (0, 1_000_000):
            chat = common_pb2.ChatPrompt(messages=[common_pb2.ChatMessage()] * count)
            code, details = _refusal(stub.Chat(inference_pb2.ChatRequest(chat=chat), timeout=60))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert details["BadRequest"].field_violations[0].field == "messages"
        unknown = options_of(model="no such model" * 100_000)
        code, details = _refusal(
            stub.Generate(inference_pb2.GenerateRequest(text="x", options=unknown), timeout=60)
        )
        assert code is grpc.StatusCode.NOT_FOUND
        assert details["ErrorInfo"].reason == "MODEL_NOT_FOUND"


def test_a_hundred_thousand_starts(victims: Victims) -> None:
    """More than a session may leave unread: it ends, and all it began."""
    start = inference_pb2.SessionStart(id=1, generate=GENERATE)
    with victims.unharmed(), victims.channel("gateway") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.SessionRequest(starts=[start] * 100_000, cancels=range(100_000))
        assert code_of(stub.Session(iter([request]))) is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_wrong_submits_are_their_own(victims: Victims) -> None:
    """Each is refused or served under its handle, whatever its neighbours are."""

    def submit(handle: int, ids: Iterable[int] = (1, 2, 3), **fields: Any) -> worker_pb2.Submit:
        fields.setdefault("max_tokens", 4)
        sampling = common_pb2.SamplingParams(**fields)
        return worker_pb2.Submit(handle=handle, prompt_ids=ids, sampling=sampling)

    good = {0, 7, HUGE}
    submits = [
        *(submit(handle) for handle in good),
        submit(7),  # in use: refused under the same handle
        submit(10, ids=()),
        submit(11, ids=[259]),
        submit(12, ids=[HUGE]),
        submit(13, ids=range(100_000)),
        submit(14, temperature=NAN),
        submit(15, top_p=-1),
        submit(16, logit_bias={HUGE: 1.0}),
        submit(17, grammar=common_pb2.Grammar()),
        worker_pb2.Submit(handle=18, prompt_ids=[1], resume_ids=[HUGE]),
        submit(19, stop_token_ids=[HUGE]),
    ]
    request = worker_pb2.WorkerSessionRequest(submits=submits, aborts=[99, 98])
    finished: set[int] = set()
    rejected: list[int] = []
    with victims.unharmed(), victims.channel("worker") as channel:
        for response in session_of(channel, "worker", [worker_pb2.WorkerSessionRequest(), request]):
            finished.update(row.handle for row in response.step.finished)
            for row in response.step.rejected:
                assert row.error.code == common_pb2.ERROR_CODE_INVALID_ARGUMENT or row.handle == 13
                rejected.append(row.handle)
            if len(finished) + len(rejected) >= len(submits):
                break
    assert finished >= good
    assert sorted([*rejected, *(finished - good)]) == [7, *range(10, 20)]


def test_a_hundred_thousand_submits(victims: Victims) -> None:
    sampling = common_pb2.SamplingParams(max_tokens=2)
    submits = [
        worker_pb2.Submit(handle=handle, prompt_ids=[1], sampling=sampling)
        for handle in range(100_000)
    ]
    requests = [
        worker_pb2.WorkerSessionRequest(submits=submits[first : first + 10_000])
        for first in range(0, len(submits), 10_000)
    ]
    answered = 0
    with victims.unharmed(), victims.channel("worker") as channel:
        for response in session_of(channel, "worker", requests):
            answered += len(response.step.finished) + len(response.step.rejected)
            if answered == len(submits):
                break
    assert answered == len(submits)


def test_wrong_jobs_are_their_own(victims: Victims) -> None:
    def job(handle: int, **fields: Any) -> tokenizer_pb2.EncodeJob:
        return tokenizer_pb2.EncodeJob(handle=handle, request=tokenizer_pb2.EncodeRequest(**fields))

    deep = "[" * 100_000
    user = common_pb2.ChatMessage(role="user", content="x")
    jobs = [
        job(0, text="fine"),
        job(1),
        job(2, token_ids=common_pb2.TokenIds(ids=[HUGE])),
        job(3, chat=common_pb2.ChatPrompt()),
        job(4, chat=common_pb2.ChatPrompt(messages=[user], tools_json=deep)),
        job(5, chat=common_pb2.ChatPrompt(messages=[user], template_kwargs_json="[]")),
        job(HUGE, text="fine"),
    ]
    requests = [
        tokenizer_pb2.TokenizerSessionRequest(jobs=jobs, cancels=[77]),
        *(
            tokenizer_pb2.TokenizerSessionRequest(
                jobs=[job(first + number, text="x") for number in range(10_000)]
            )
            for first in range(100, 20_100, 10_000)
        ),
    ]
    outcomes: dict[int, str | None] = {}
    with victims.unharmed(), victims.channel("tokenizer") as channel:
        for response in session_of(channel, "tokenizer", requests):
            outcomes.update({row.handle: row.WhichOneof("outcome") for row in response.results})
            if len(outcomes) == len(jobs) + 20_000:
                break
    assert outcomes[0] == outcomes[HUGE] == "response"
    assert {outcomes[handle] for handle in range(1, 6)} == {"error"}


def test_wrong_texts_are_their_own(victims: Victims) -> None:
    empty_stop = common_pb2.TextOptions(stop=[""])
    opens = [
        tokenizer_pb2.OpenText(handle=0),
        tokenizer_pb2.OpenText(handle=1, options=empty_stop),
        tokenizer_pb2.OpenText(handle=2, replay_ids=[HUGE, 65], skip_chars=HUGE),
        *(tokenizer_pb2.OpenText(handle=100 + number) for number in range(20_000)),
    ]
    requests = [
        tokenizer_pb2.DetokenizerSessionRequest(
            opens=opens, handles=[0, 50, 0], counts=[2, 1, 1], token_ids=[72, HUGE, 65, 73]
        ),
        tokenizer_pb2.DetokenizerSessionRequest(ends=[0, 0, 50], closes=[51, 2]),
    ]
    ended: dict[int, common_pb2.Error] = {}
    text = ""
    with victims.unharmed(), victims.channel("detokenizer") as channel:
        for response in session_of(channel, "detokenizer", requests):
            ended.update({row.handle: row.error for row in response.ended})
            text += "".join(
                piece
                for handle, piece in zip(response.handles, response.texts, strict=True)
                if handle == 0
            )
            if 0 in ended:
                break
        assert text == "HI"
        assert ended[1].code == common_pb2.ERROR_CODE_INVALID_ARGUMENT
        refused = [handle for handle in ended if handle >= 100]
        assert len(refused) == 20_002 - 16_384
        assert ended[refused[0]].code == common_pb2.ERROR_CODE_OVERLOADED
        wrong = tokenizer_pb2.DetokenizerSessionRequest(handles=[1], counts=[5], token_ids=[1])
        code = code_of(session_of(channel, "detokenizer", [wrong]))
        assert code is grpc.StatusCode.INVALID_ARGUMENT


def test_wrong_simple_calls(victims: Victims) -> None:
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    cases: tuple[tuple[str, str, Any, grpc.StatusCode], ...] = (
        ("gateway", "Inference/Tokenize", inference_pb2.TokenizeRequest(), invalid),
        (
            "gateway",
            "Inference/Tokenize",
            inference_pb2.TokenizeRequest(chat=common_pb2.ChatPrompt()),
            invalid,
        ),
        (
            "gateway",
            "Inference/Detokenize",
            inference_pb2.DetokenizeRequest(token_ids=[HUGE]),
            invalid,
        ),
        (
            "gateway",
            "Inference/Tokenize",
            inference_pb2.TokenizeRequest(text="x" * (17 << 20)),
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        ),
        ("tokenizer", "Tokenizer/Encode", tokenizer_pb2.EncodeRequest(), invalid),
        (
            "detokenizer",
            "Detokenizer/Decode",
            tokenizer_pb2.DecodeRequest(token_ids=[259]),
            invalid,
        ),
        (
            "detokenizer",
            "Detokenizer/Lookup",
            tokenizer_pb2.LookupRequest(token_ids=[HUGE]),
            grpc.StatusCode.OK,
        ),
        ("worker", "Worker/Generate", worker_pb2.WorkerGenerateRequest(), invalid),
        ("worker", "Worker/GetInfo", worker_pb2.GetInfoRequest(), grpc.StatusCode.OK),
    )
    with victims.unharmed():
        for role, method, request, expected in cases:
            with victims.channel(role) as channel:
                call = raw_call(channel, f"/shoal.v1.{method}", request.SerializeToString())
                assert code_of(call) is expected, method
