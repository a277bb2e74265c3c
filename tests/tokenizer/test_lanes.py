"""Encoding threads: short prompts pass long ones, faults stay with their prompt."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from services.common.errors import InvalidRequest
from services.common.text.vocabulary import build_vocabulary
from services.tokenizer.encoder import Encoder, Prepared
from services.tokenizer.lanes import LONG_CHARACTERS, TINY_CHARACTERS, Encoded, Lanes, Prepare


class SlowEncoder(Encoder):
    """The byte encoder; texts that begin with "wait" take until `go` is set."""

    def __init__(self) -> None:
        super().__init__(build_vocabulary("byte"))
        self.go = threading.Event()
        self.waiting = threading.Event()
        self.batches: list[int] = []

    def encode(self, prepared: Sequence[Prepared]) -> list[list[int]]:
        self.batches.append(len(prepared))
        if any(item.text.startswith("wait") for item in prepared):
            self.waiting.set()
            assert self.go.wait(30)
        if any(item.text == "fault" for item in prepared):
            raise RuntimeError("a fault")
        return super().encode(prepared)


QUEUED = TINY_CHARACTERS + 1


def text(value: str) -> Prepare:
    return lambda encoder: encoder.prepare_text(value, add_special_tokens=False)


@pytest.fixture(scope="module")
def encoder() -> SlowEncoder:
    return SlowEncoder()


async def test_a_short_prompt_passes_a_long_one(encoder: SlowEncoder) -> None:
    encoder.go.clear()
    encoder.waiting.clear()
    async with Lanes(encoder, 1) as lanes:
        long = asyncio.create_task(lanes.encode(text("wait"), LONG_CHARACTERS + 1))
        await asyncio.to_thread(encoder.waiting.wait, 30)
        assert (await lanes.encode(text("hi"), 2)).token_ids == [104, 105]
        assert not long.done()
        encoder.go.set()
        assert (await long).token_ids == list(b"wait")


async def test_what_queues_up_is_one_batch_and_cancelled_prompts_are_left_out(
    encoder: SlowEncoder,
) -> None:
    encoder.go.clear()
    encoder.waiting.clear()
    async with Lanes(encoder, 1) as lanes:
        first = asyncio.create_task(lanes.encode(text("wait"), QUEUED))
        await asyncio.to_thread(encoder.waiting.wait, 30)
        encoder.batches.clear()
        others = [asyncio.create_task(lanes.encode(text(c), QUEUED)) for c in "abcdef"]
        await asyncio.sleep(0)  # they are queued now
        others[2].cancel()
        await asyncio.wait([others[2]])
        encoder.go.set()
        assert (await first).token_ids == list(b"wait")
        assert [(await other).token_ids for other in others if other is not others[2]] == [
            [ord(c)] for c in "abdef"
        ]
        assert encoder.batches == [5]


async def test_many_tiny_prompts_do_not_hold_the_event_loop(encoder: SlowEncoder) -> None:
    encoder.batches.clear()
    async with Lanes(encoder, 1) as lanes:
        answers = await asyncio.gather(*[lanes.encode(text(chr(i)), 1) for i in range(100)])
        assert [answer.token_ids for answer in answers] == [[i] for i in range(100)]
        assert encoder.batches == [1] * 64 + [36]  # at once, and the rest in a thread
        assert (await lanes.encode(text("z"), 1)).token_ids == [122]
        assert encoder.batches[-1] == 1


@pytest.mark.parametrize("size", [1, QUEUED])
async def test_a_fault_is_its_own_prompts(encoder: SlowEncoder, size: int) -> None:
    def refuse(encoder: Encoder) -> Prepared:
        raise InvalidRequest("no")

    def fail(encoder: Encoder) -> Prepared:
        raise RuntimeError("broken")

    async with Lanes(encoder, 1) as lanes:
        prompts = (text("a"), refuse, text("fault"), fail, text("b"))
        outcomes = await asyncio.gather(
            *(lanes.encode(how, size) for how in prompts),
            return_exceptions=True,
        )
        kinds = [type(outcome) for outcome in outcomes]
        assert kinds == [Encoded, InvalidRequest, RuntimeError, RuntimeError, Encoded]
        assert (await lanes.encode(text("c"), 1)).token_ids == [99]
