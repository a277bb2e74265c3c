"""A session's jobs within this process: what a turn of the loop does, what counts, what ends."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import pytest
from prometheus_client import CollectorRegistry

from protos import common_pb2, tokenizer_pb2
from services.common.errors import InternalError
from services.common.text.vocabulary import build_vocabulary
from services.tokenizer.encode_servicer import EncodeSession, TokenizerServicer
from services.tokenizer.encoder import Encoder, Prepared
from services.tokenizer.lanes import MAX_AT_ONCE, TINY_CHARACTERS, Lanes
from services.tokenizer.metrics import TokenizerMetrics
from services.tokenizer.session import Sessions


class Rig:
    """A session over a tokenizer, without the wire."""

    def __init__(self, lanes: Lanes) -> None:
        self.registry = CollectorRegistry()
        self.sessions = Sessions()
        metrics = TokenizerMetrics(self.registry, self.sessions)
        self.servicer = TokenizerServicer(self.sessions, metrics)
        self.servicer.lanes = lanes
        self.session = EncodeSession(self.servicer, self.sessions)

    def send(self, *requests: tokenizer_pb2.EncodeRequest) -> None:
        """Jobs of one message, with handles from 0."""
        jobs = [
            tokenizer_pb2.EncodeJob(handle=handle, request=request)
            for handle, request in enumerate(requests)
        ]
        self.session.receive(tokenizer_pb2.TokenizerSessionRequest(jobs=jobs))

    async def answers(self) -> dict[int, tokenizer_pb2.EncodeResult]:
        await self.sessions.idle()
        return {result.handle: result for result in self.session.outbox.pending.results}

    def value(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(f"shoal_tokenizer_{name}", labels)
        assert value is not None
        return value


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(build_vocabulary("byte"))


@pytest.fixture
async def rig(encoder: Encoder) -> AsyncIterator[Rig]:
    async with Lanes(encoder, 1) as lanes:
        yield Rig(lanes)


def text(value: str, **fields: object) -> tokenizer_pb2.EncodeRequest:
    return tokenizer_pb2.EncodeRequest(text=value, **fields)  # type: ignore[arg-type]


QUEUED = "x" * (TINY_CHARACTERS + 1)


@pytest.mark.parametrize("prompt", ["a", QUEUED])
async def test_a_step_back_of_the_wall_clock_is_no_negative_time(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, prompt: str
) -> None:
    clock = itertools.count(10**18, -(10**15))
    monkeypatch.setattr(time, "time_ns", lambda: next(clock))
    rig.send(text(prompt))
    await rig.answers()
    assert rig.value("encode_seconds_count") == 1
    assert rig.value("encode_seconds_sum") >= 0


@pytest.mark.parametrize("prompt", ["a", QUEUED])
async def test_time_counts_from_the_receipt(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, prompt: str
) -> None:
    now = 10**9
    monkeypatch.setattr(time, "monotonic_ns", lambda: now)
    rig.send(text(prompt), text(prompt))
    now += 5 * 10**9  # before the loop's next turn, in which their encoding begins
    await rig.answers()
    assert rig.value("encode_seconds_count") == 2
    assert rig.value("encode_seconds_sum") == 10


async def test_no_turn_of_the_loop_encodes_more_than_its_share(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, here = asyncio.get_running_loop(), threading.get_ident()
    turn = 0
    on_loop: Counter[int] = Counter()
    in_threads = 0

    def next_turn() -> None:
        nonlocal turn
        turn += 1
        loop.call_soon(next_turn)

    def encode(self: Encoder, prepared: Sequence[Prepared]) -> list[list[int]]:
        nonlocal in_threads
        if threading.get_ident() == here:
            on_loop[turn] += len(prepared)
        else:
            in_threads += len(prepared)
        return original(self, prepared)

    original = Encoder.encode
    monkeypatch.setattr(Encoder, "encode", encode)
    next_turn()
    rig.send(*[text("a")] * 200)
    rig.session.receive(
        tokenizer_pb2.TokenizerSessionRequest(
            jobs=[tokenizer_pb2.EncodeJob(handle=h, request=text("b")) for h in range(200, 220)]
        )
    )
    assert len(await rig.answers()) == 220
    assert max(on_loop.values()) == MAX_AT_ONCE
    assert in_threads == 220 - on_loop.total()


async def test_what_a_fault_undoes_counts_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def spell(self: Encoder, token_ids: Sequence[int]) -> list[str]:
        raise RuntimeError("a fault")

    monkeypatch.setattr(Encoder, "spell", spell)
    refused = tokenizer_pb2.EncodeRequest(chat=common_pb2.ChatPrompt())
    rig.send(text("a"), refused, text("b", return_token_strs=True))
    answers = await rig.answers()
    assert list(answers[0].response.token_ids) == [256, 97]
    assert answers[1].error.code == common_pb2.ERROR_CODE_INVALID_ARGUMENT
    assert answers[2].error.code == common_pb2.ERROR_CODE_INTERNAL
    assert rig.value("encode_seconds_count") == 1
    assert rig.value("tokens_total") == 2
    assert rig.value("failures_total", code="invalid_argument") == 1
    assert rig.value("failures_total", code=InternalError.code.name.lower()) == 1


async def test_after_a_close_nothing_is_begun(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(self: Encoder, prepared: Sequence[Prepared]) -> list[list[int]]:
        raise RuntimeError("a fault")

    monkeypatch.setattr(Encoder, "encode", encode)
    tasks = asyncio.all_tasks()
    rig.send(text("a"), text("b"))
    assert rig.sessions.work == 2
    await rig.session.close()
    assert await rig.answers() == {}
    assert asyncio.all_tasks() == tasks
    assert rig.value("failures_total", code="internal") == 0


@pytest.mark.parametrize("kind", ["text", "chat"])
async def test_a_prompt_that_cannot_fit_is_refused_unencoded(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def encode(self: Encoder, prepared: Sequence[Prepared]) -> list[list[int]]:
        assert not prepared
        return []

    monkeypatch.setattr(Encoder, "encode", encode)
    content = "a " * 4_000_000
    request = tokenizer_pb2.EncodeRequest(max_model_len=2048)
    if kind == "text":
        request.text = content
    else:
        request.chat.messages.add(role="user", content=content)
    async with Lanes(Encoder(build_vocabulary("")), 1) as lanes:
        rig = Rig(lanes)
        rig.send(request)
        error = (await rig.answers())[0].error
    assert error.code == common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED
    assert error.param == ("prompt" if kind == "text" else "messages")
    least = 98_766 if kind == "text" else 98_768  # of 81 bytes each, and the template's own
    assert f"length is 2048 tokens, but the prompt has at least {least} tokens" in error.message


async def test_a_prompt_at_the_limit_or_without_one_is_encoded(rig: Rig) -> None:
    least = 100  # of five bytes each, as the longest token has
    content = "<bos>" * least
    rig.send(
        text(content, max_model_len=least),
        text(content, max_model_len=least + 1),
        text(content),
        text("x" * 10_000),
    )
    answers = await rig.answers()
    assert answers[0].error.code == common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED
    assert [len(answers[i].response.token_ids) for i in (1, 2, 3)] == [101, 101, 10_001]
