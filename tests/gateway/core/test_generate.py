"""The story of a request, with scripted peers."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from pathlib import Path
from typing import Any

import pytest

from protos import common_pb2, tokenizer_pb2
from services.common.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ShoalError,
    Unavailable,
)
from services.gateway.dialect import dialect_of
from services.gateway.domain import Dialect, TextOptions, TokenPrompt, Usage
from tests.gateway.core.conftest import Rig, collect, joined, make_rig, request
from tests.gateway.core.fakes import EOS, expected_ids, expected_text

INFO = tokenizer_pb2.TokenizerInfo(
    tool_format=tokenizer_pb2.TOOL_FORMAT_LLAMA3_JSON,
    reasoning_format=tokenizer_pb2.REASONING_FORMAT_QWEN3,
    reasoning_end_id=7,
)


async def test_streams_the_whole_answer(rig: Rig) -> None:
    generation = await rig.core.start(request("hello"))
    chunks = await collect(generation)
    assert joined(chunks) == (expected_text("hello", 10), expected_ids("hello", 10))
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]
    assert chunks[-1].finish_reason == "length"
    assert generation.usage == Usage(5, 10, cached_tokens=4)
    await rig.settled()


async def test_a_generation_is_freed_without_the_collector_of_cycles(rig: Rig) -> None:
    gc.disable()
    try:
        generation = await rig.core.start(request("hello"))
        await collect(generation)
        assert generation.usage.completion_tokens == 10
        freed = weakref.ref(generation)
        await rig.settled()
        del generation
        assert freed() is None
    finally:
        gc.enable()


async def test_one_message_to_the_detokenizer_per_worker_frame(rig: Rig) -> None:
    rig.worker.auto = False
    generations = [await rig.core.start(request(f"prompt {i}")) for i in range(64)]
    await rig.until(lambda: len(rig.detokenizer.texts) == 64)
    rig.detokenizer.frames.clear()
    rig.worker.step()
    await rig.until(lambda: rig.detokenizer.frames)
    chunks = [await anext(generation) for generation in generations]
    assert [chunk.text for chunk in chunks] == [expected_text(f"prompt {i}", 1) for i in range(64)]
    assert len(rig.detokenizer.frames) == 1
    assert len(rig.detokenizer.frames[0].handles) == 64
    for generation in generations:
        await generation.aclose()
    await rig.settled()


async def test_unread_chunks_merge(rig: Rig) -> None:
    rig.worker.auto = False
    generation = await rig.core.start(request(max_tokens=6))
    for _ in range(5):
        rig.worker.step()
    await rig.until(lambda: any(len(text.ids) == 5 for text in rig.detokenizer.texts.values()))
    rig.worker.step()
    await rig.until(lambda: not rig.detokenizer.texts)
    chunks = await collect(generation)
    assert len(chunks) <= 2
    assert joined(chunks)[0] == expected_text("hello", 6)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
async def test_text_goes_straight_to_the_client_in_order_with_the_chunks(
    rig: Rig, share: float
) -> None:
    """Past the reader while it waits, never while it is busy or the writer refuses."""
    draw = random.Random(1)
    texts, reader_busy, num_written = {0: "", 1: ""}, False, 0

    def write(index: int, text: str) -> bool:
        nonlocal num_written
        assert not reader_busy
        if draw.random() >= share:
            return False
        texts[index] += text
        num_written += 1
        return True

    generation = await rig.core.start(request(n=2, max_tokens=60))
    generation.send_text_to(write)
    async for chunk in generation:
        reader_busy = True
        texts[chunk.index] += chunk.text
        await asyncio.sleep(0)
        reader_busy = False
    assert texts == dict.fromkeys((0, 1), expected_text("hello", 60))
    assert generation.usage.completion_tokens == 120
    assert rig.registry.get_sample_value("shoal_gateway_output_tokens_total") == 120
    assert (num_written > 0) == (share > 0)
    await rig.settled()


async def test_text_with_logprobs_is_left_to_the_chunks(rig: Rig) -> None:
    generation = await rig.core.start(request(logprobs=0))
    generation.send_text_to(lambda index, text: pytest.fail("it lacks the logprobs"))
    chunks = await collect(generation)
    assert len([entry for chunk in chunks for entry in chunk.logprobs or ()]) == 10
    await rig.settled()


async def test_choices_draw_with_their_own_seeds(rig: Rig) -> None:
    generation = await rig.core.start(request(n=3, seed=7))
    chunks = await collect(generation)
    assert sorted(submit.sampling.seed for submit in rig.worker.submits) == [7, 8, 9]
    finishes = [chunk.index for chunk in chunks if chunk.finish_reason]
    assert sorted(finishes) == [0, 1, 2]
    for index in range(3):
        assert joined(chunks, index)[0] == expected_text("hello", 10)
    assert generation.usage.completion_tokens == 30
    assert generation.usage.prompt_tokens == 5
    await rig.settled()


async def test_a_request_without_seed_gets_one(rig: Rig) -> None:
    await collect(await rig.core.start(request()))
    await collect(await rig.core.start(request()))
    first, second = (submit.sampling.seed for submit in rig.worker.submits)
    assert first != second


async def test_eos_is_counted_and_has_no_text(rig: Rig) -> None:
    rig.worker.eos_at = 4
    generation = await rig.core.start(request(logprobs=0))
    chunks = await collect(generation)
    text, ids = joined(chunks)
    assert text == expected_text("hello", 4)
    assert ids == [*expected_ids("hello", 4), EOS]
    assert generation.usage.completion_tokens == 5
    assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == ("stop", None)
    logprobs = [entry for chunk in chunks for entry in chunk.logprobs or ()]
    assert [entry.token_id for entry in logprobs] == ids
    await rig.settled()


async def test_eos_at_once(rig: Rig) -> None:
    rig.worker.eos_at = 0
    generation = await rig.core.start(request(stop_token_ids=(EOS,)))
    chunks = await collect(generation)
    assert joined(chunks) == ("", [EOS])
    assert [(chunk.finish_reason, chunk.stop_reason) for chunk in chunks] == [("stop", EOS)]


async def test_a_stop_string_aborts_and_counts_through_its_last_token(rig: Rig) -> None:
    text = expected_text("hello", 20)
    stop = text[6:8]
    generation = await rig.core.start(
        request(max_tokens=500, text=TextOptions(stop=(stop,)), logprobs=1)
    )
    chunks = await collect(generation)
    end = text.index(stop)
    got, ids = joined(chunks)
    assert got == text[:end]
    assert ids == expected_ids("hello", end + 2)
    assert generation.usage == Usage(5, end + 2, cached_tokens=4)
    assert sum(len(chunk.logprobs or ()) for chunk in chunks) == end + 2
    assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == ("stop", stop)
    await rig.settled()
    assert len(rig.worker.aborts) == 1


async def test_prompt_logprobs_are_set_before_the_first_chunk(rig: Rig) -> None:
    generation = await rig.core.start(request(prompt_logprobs=0))
    await anext(generation)
    assert generation.prompt_logprobs is not None
    assert [entry.token_id for entry in generation.prompt_logprobs] == list(map(ord, "hello"))
    await generation.aclose()


async def test_prompt_too_long_names_both_numbers(rig: Rig) -> None:
    with pytest.raises(ContextLengthExceeded, match=r"1000 tokens.* 1000 ") as error:
        await rig.core.start(request("x" * 1000))
    assert error.value.param == "prompt"
    rig.assert_nothing_left()


@pytest.mark.parametrize(("asked", "given"), [(None, 3), (50, 3), (2, 2)])
async def test_max_tokens_is_clamped_to_the_context(
    rig: Rig, asked: int | None, given: int
) -> None:
    chunks = await collect(await rig.core.start(request("x" * 997, max_tokens=asked)))
    assert len(joined(chunks)[1]) == given
    assert chunks[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": TokenPrompt((1, 256))}, "prompt"),
        ({"prompt": TokenPrompt(())}, "prompt"),
        ({"logit_bias": {256: 1.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"stop_token_ids": (300,)}, "stop_token_ids"),
    ],
)
async def test_ids_outside_the_vocabulary(rig: Rig, changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        await rig.core.start(request(**changes))
    assert error.value.param == param
    rig.assert_nothing_left()


@pytest.mark.parametrize(("most", "kept"), [(3, "llo"), (99, "hello"), (None, "hello")])
async def test_a_prompt_is_truncated_from_its_start(rig: Rig, most: int | None, kept: str) -> None:
    generation = await rig.core.start(request("hello", max_prompt_tokens=most))
    assert list(generation.prompt_token_ids) == [ord(char) for char in kept]
    await generation.aclose()


async def test_a_prompt_is_truncated_to_what_leaves_room(rig: Rig) -> None:
    limit = rig.core.models()[0].max_model_len
    prompt = "a" * (2 * limit)
    generation = await rig.core.start(request(prompt, max_prompt_tokens=0, max_tokens=7))
    assert len(generation.prompt_token_ids) == limit - 7
    await generation.aclose()


@pytest.mark.parametrize("most", [None, 0, 3])
async def test_the_tokenizer_knows_the_limit_of_a_prompt_that_is_not_cut(
    rig: Rig, most: int | None
) -> None:
    limit = rig.core.models()[0].max_model_len
    generation = await rig.core.start(request("hello", max_prompt_tokens=most))
    [job] = rig.tokenizer.jobs
    assert job.request.HasField("max_model_len") == (most is None)
    assert job.request.max_model_len == (limit if most is None else 0)
    await generation.aclose()


async def test_the_dialect_is_what_the_tokenizer_says(rig: Rig) -> None:
    assert await rig.core.dialect("") == Dialect()
    assert dialect_of(INFO, "auto", "auto") == Dialect("llama3_json", "qwen3", 7)
    assert dialect_of(INFO, "hermes", "none") == Dialect("hermes", "none", 7)
    with pytest.raises(ModelNotFound):
        await rig.core.dialect("nope")


async def test_what_the_prompt_says_of_reasoning_is_the_generations(rig: Rig) -> None:
    rig.tokenizer.reasoning = tokenizer_pb2.REASONING_STATE_OPEN
    generation = await rig.core.start(request("hello"))
    assert generation.reasoning == "open"
    await generation.aclose()


async def test_the_tokenizers_refusal_is_the_requests(rig: Rig) -> None:
    with pytest.raises(InvalidRequest, match="bad text"):
        await rig.core.start(request("bad"))
    rig.assert_nothing_left()


async def test_token_prompts_need_no_tokenizer(rig: Rig) -> None:
    prompt = TokenPrompt(tuple(map(ord, "hello")))
    chunks = await collect(await rig.core.start(request(prompt=prompt)))
    assert joined(chunks)[0] == expected_text("hello", 10)
    assert not rig.tokenizer.jobs


async def test_unknown_model_lists_those_that_are_served(rig: Rig) -> None:
    with pytest.raises(ModelNotFound, match="fake"):
        await rig.core.start(request(model="nope"))


async def test_leaving_while_encoding_cancels_the_encode(rig: Rig) -> None:
    rig.tokenizer.hold = True
    task = asyncio.create_task(rig.core.start(request()))
    await rig.until(lambda: rig.tokenizer.jobs)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    rig.assert_nothing_left()
    await rig.until(lambda: rig.tokenizer.cancels)
    assert not rig.worker.submits


@pytest.mark.parametrize("n", [1, 3])
async def test_leaving_before_acceptance_aborts(rig: Rig, n: int) -> None:
    rig.worker.accept = False
    task = asyncio.create_task(rig.core.start(request(n=n)))
    await rig.until(lambda: len(rig.worker.submits) == n)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await rig.settled()
    await rig.until(lambda: len(rig.worker.aborts) == n)
    await rig.until(lambda: len(rig.detokenizer.closes) == n)


async def test_leaving_in_mid_stream_aborts_in_the_same_tick(rig: Rig) -> None:
    generation = await rig.core.start(request(n=2, max_tokens=900))
    await anext(generation)
    await generation.aclose()
    rig.assert_nothing_left()  # nothing was awaited since
    await rig.until(lambda: len(rig.worker.aborts) == 2)
    await rig.settled()
    with pytest.raises(StopAsyncIteration):
        await anext(generation)


async def test_closing_wakes_a_waiting_reader(rig: Rig) -> None:
    rig.worker.auto = False
    generation = await rig.core.start(request())
    reader = asyncio.create_task(collect(generation))
    await asyncio.wait([reader], timeout=0)
    await generation.aclose()
    assert await reader == []


async def test_a_slow_client_is_cut_off_at_the_cap(tmp_path: Path) -> None:
    async with make_rig(tmp_path, max_buffer_bytes=20) as rig:
        generation = await rig.core.start(request(max_tokens=900))
        await rig.until(lambda: rig.worker.aborts)
        with pytest.raises(Cancelled):
            await collect(generation)
        await rig.settled()


@pytest.mark.parametrize("stage", ["encode", "accept", "stream"])
async def test_the_deadline_covers_every_stage(rig: Rig, stage: str) -> None:
    rig.tokenizer.hold = stage == "encode"
    rig.worker.accept = stage != "accept"
    rig.worker.auto = False
    with pytest.raises(DeadlineExceeded):
        await collect(await rig.core.start(request(timeout=0.2)))
    await rig.settled()
    if stage != "encode":
        (submit,) = rig.worker.submits
        assert 0 < submit.deadline_ms <= 200
        await rig.until(lambda: rig.worker.aborts)


async def test_text_before_a_failure_is_delivered_first(rig: Rig) -> None:
    rig.worker.auto = False
    generation = await rig.core.start(request())
    rig.worker.step()
    await anext(generation)
    rig.worker.step()
    (handle,) = rig.worker.running
    error = common_pb2.Error(code=common_pb2.ERROR_CODE_INTERNAL, message="grammar broke")
    rig.worker.pending.step.rejected.add(handle=handle, error=error)
    rig.worker.send()
    with pytest.raises(ShoalError, match="grammar broke"):
        await collect(generation)
    rig.worker.running.clear()
    rig.assert_nothing_left()


async def test_overload_tries_one_other_worker(tmp_path: Path) -> None:
    overloaded = common_pb2.Error(
        code=common_pb2.ERROR_CODE_OVERLOADED, message="queue full", retry_after_ms=2500
    )
    async with make_rig(tmp_path, workers=2) as rig:
        rig.workers[0].reject_with = overloaded
        for _ in range(8):
            chunks = await collect(await rig.core.start(request()))
            assert joined(chunks)[0] == expected_text("hello", 10)
        assert rig.workers[0].submits, "both were tried"
        rig.workers[1].reject_with = overloaded
        with pytest.raises(Overloaded, match="queue full") as error:
            await rig.core.start(request())
        assert error.value.retry_after == 2.5
        await rig.settled()


async def test_too_many_requests_are_refused(tmp_path: Path) -> None:
    async with make_rig(tmp_path, max_requests=1) as rig:
        rig.worker.auto = False
        first = await rig.core.start(request())
        with pytest.raises(Overloaded):
            await rig.core.start(request())
        sample = rig.registry.get_sample_value
        assert sample("shoal_gateway_errors_total", {"code": "overloaded"}) == 1
        assert sample("shoal_gateway_request_seconds_count") == 0  # it took no time at all
        await first.aclose()
        second = await rig.core.start(request())
        await second.aclose()
        assert sample("shoal_gateway_request_seconds_count") == 2


async def test_drain_refuses_and_waits(rig: Rig) -> None:
    generation = await rig.core.start(request(max_tokens=50))
    drain = asyncio.create_task(rig.core.drain(10))
    await asyncio.wait([drain], timeout=0)
    readiness = rig.core.readiness()
    assert (readiness.ready, readiness.draining) == (False, True)
    assert "draining" in readiness.reasons
    with pytest.raises(Unavailable):
        await rig.core.start(request())
    assert joined(await collect(generation))[0] == expected_text("hello", 50)
    await drain


async def test_drain_ends_what_is_left_with_an_error(rig: Rig) -> None:
    rig.worker.auto = False
    generation = await rig.core.start(request())
    await rig.core.drain(0.01)
    with pytest.raises(Unavailable):
        await collect(generation)
    await rig.settled()


async def test_a_thousand_leavers_leave_nothing(rig: Rig) -> None:
    async def visit(number: int) -> None:
        generation = await rig.core.start(request(f"prompt {number}", max_tokens=900))
        for _ in range(number % 3):
            await anext(generation)
        await generation.aclose()

    for start in range(0, 1000, 50):
        await asyncio.gather(*(visit(start + i) for i in range(50)))
    await rig.settled()
