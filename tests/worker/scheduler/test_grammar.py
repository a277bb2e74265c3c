"""Rows that follow grammars: every output is valid, whatever happens to them or beside them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from services.common.errors import InvalidRequest
from services.worker.core import FinishReason, IntArray, SamplingParams, unpack_mask
from tests.full import FULL
from tests.worker.grammar.grammars import (
    EOS,
    Case,
    choice_case,
    random_case,
    regex_case,
    schema_case,
    text_of,
)
from tests.worker.scheduler.harness import Client, Harness, make_info

NUM_RANDOM = 2000 if FULL else 150

PERSON = schema_case(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
)


def submit(
    harness: Harness,
    case: Case,
    prompt: Sequence[int],
    *,
    resume_ids: Sequence[int] = (),
    max_tokens: int = 1900,
    **sampling: object,
) -> Client:
    params = SamplingParams(max_tokens=max_tokens, grammar=case.grammar, **sampling)  # type: ignore[arg-type]
    matcher = case.matcher()
    assert matcher.accepts(list(resume_ids))
    return harness.submit(prompt, sampling=params, resume_ids=resume_ids, matcher=matcher)


def undisturbed(case: Case, prompt: Sequence[int], max_tokens: int = 1900) -> list[int]:
    harness = Harness(overlap=False)
    client = submit(harness, case, prompt, max_tokens=max_tokens)
    harness.run()
    return client.tokens


def check_valid(case: Case, client: Client) -> None:
    assert client.error is None
    assert client.reason is FinishReason.STOP
    assert client.tokens[-1] == EOS
    assert EOS not in client.tokens[:-1]
    assert case.valid(text_of(client.tokens)), text_of(client.tokens)


@pytest.mark.parametrize("overlap", [True, False])
def test_every_output_of_random_grammars_is_valid_and_plain_rows_are_as_ever(
    overlap: bool,
) -> None:
    seed = int(os.environ.get("SHOAL_SEED", "1"))
    random = Random(seed)
    num_done = 0
    while num_done < NUM_RANDOM:
        harness = Harness(
            make_info(num_pages=16384, max_model_len=2048), max_running=32, overlap=overlap
        )
        cases = [random_case(random) for _ in range(20)]
        clients = [
            submit(harness, case, [random.randrange(256) for _ in range(random.randint(1, 40))])
            for case in cases
        ]
        plain = [harness.submit([n + 1] * 9, max_tokens=30) for n in range(10)]
        harness.run()
        for case, client in zip(cases, clients, strict=True):
            check_valid(case, client)
        for client in plain:
            assert client.tokens == client.oracle(30)
        num_done += len(cases)
    print(f"{num_done} random grammars, seed {seed}")


@pytest.mark.parametrize("overlap", [True, False])
def test_preemption_changes_no_output(overlap: bool) -> None:
    cases = [PERSON, regex_case("(ab|cd){20,30}"), choice_case("yes please", "no thank you")] * 3
    prompts = [[n + 7] * 5 for n in range(len(cases))]
    small = make_info(page_size=2, num_pages=110, max_model_len=220)
    harness = Harness(small, max_running=9, overlap=overlap)
    clients = [
        submit(harness, case, prompt, max_tokens=210)
        for case, prompt in zip(cases, prompts, strict=True)
    ]
    harness.run()
    assert harness.scheduler.counters.num_preempted > 0
    for case, prompt, client in zip(cases, prompts, clients, strict=True):
        assert client.tokens == undisturbed(case, prompt, max_tokens=210)
        check_valid(case, client)


def test_a_resume_at_every_position_gives_the_undisturbed_output() -> None:
    prompt = [3, 1, 4, 1, 5]
    whole = undisturbed(PERSON, prompt)
    assert len(whole) > 20
    harness = Harness(max_running=16)
    clients = [
        submit(harness, PERSON, prompt, resume_ids=whole[:length]) for length in range(len(whole))
    ]
    harness.run()
    for length, client in enumerate(clients):
        assert whole[:length] + client.tokens == whole


def test_an_abort_at_every_step_leaves_the_neighbour_undisturbed() -> None:
    whole = undisturbed(PERSON, [9] * 9)
    for num_steps in range(1, 12):
        harness = Harness()
        left = submit(harness, PERSON, [8] * 40)
        stays = submit(harness, PERSON, [9] * 9)
        for _ in range(num_steps):
            harness.step()
        harness.abort(left)
        harness.run()
        assert left.reason is FinishReason.ABORT
        assert stays.tokens == whole


def test_the_end_of_a_grammar_is_the_end_whatever_min_tokens_and_ignore_eos_say() -> None:
    harness = Harness()
    clients = [
        submit(harness, choice_case("ab"), [1], min_tokens=50),
        submit(harness, choice_case("ab"), [1], ignore_eos=True),
        submit(harness, choice_case("ab"), [1], min_tokens=50, ignore_eos=True),
    ]
    harness.run()
    for client in clients:
        assert client.tokens == [*b"ab", EOS]
        assert client.reason is FinishReason.STOP


def test_min_tokens_holds_the_end_back_where_the_grammar_lets_it() -> None:
    harness = Harness()
    client = submit(harness, regex_case("[a-b]{1,40}"), [1], min_tokens=30)
    harness.run()
    assert len(client.tokens) > 30
    assert client.tokens[-1] == EOS


def test_max_tokens_cuts_a_grammar_short() -> None:
    harness = Harness()
    client = submit(harness, PERSON, [1], max_tokens=5)
    harness.run()
    assert client.reason is FinishReason.LENGTH
    assert client.tokens == undisturbed(PERSON, [1])[:5]


def test_a_stop_id_that_the_grammar_allows_ends_the_request() -> None:
    harness = Harness()
    client = submit(harness, regex_case("x{30}"), [1], stop_token_ids=frozenset({ord("x")}))
    harness.run()
    assert client.tokens == [ord("x")]


class _GivesUp:
    """A matcher that cannot go on after some tokens."""

    def __init__(self, tokens: int) -> None:
        self._left = tokens

    def advance(self, token_id: int) -> None:
        self._left -= 1

    def fill(self, mask: IntArray) -> None:
        mask[:] = 0
        if self._left <= 0:
            raise InvalidRequest("The grammar cannot be used: too complex.", param="grammar")
        mask[ord("a") // 32] = 1 << ord("a") % 32


def test_a_grammar_that_becomes_too_complex_fails_its_request_alone() -> None:
    harness = Harness()
    case = choice_case("a")
    failing = harness.submit(
        [1], sampling=SamplingParams(max_tokens=50, grammar=case.grammar), matcher=_GivesUp(3)
    )
    plain = harness.submit([2] * 9, max_tokens=20)
    harness.run()
    assert isinstance(failing.error, InvalidRequest)
    assert failing.tokens == [ord("a")] * 3
    assert plain.tokens == plain.oracle(20)


def test_masks_unpack_to_one_bool_an_id() -> None:
    words = np.array([[1, -(2**31)], [0, 3]], np.int32)
    bits = unpack_mask(words, 64)
    assert [np.flatnonzero(row).tolist() for row in bits] == [[0, 63], [32, 33]]
    assert unpack_mask(words, 40).shape == (2, 40)
