"""Requests drawn at random, and whether an answer is the right one, token for token."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from typing import Any

from services.common.model_metadata import BYTE_BOS, BYTE_EOS
from tests.chaos.client import Answer, Manner
from tests.chaos.oracle import Expected, expect

# By rule a request may fail for its own deadline; with room in the queues and a hold for lost
# instances for nothing else, but at a gateway that is going away.
_LATE_STATUS, _LATE_ERROR = 504, "timeout_error"

_SHARED_PREFIX = (
    "In the beginning there was a prefix which many prompts have in common, and it goes on"
)
_PROMPTS = ("prompt", "messages")
_ALPHABET = string.ascii_letters + string.digits + "     .,;:\n"


@dataclass(frozen=True, slots=True)
class Case:
    """One request: where it is sent, what it says, and how its client behaves."""

    path: str
    body: dict[str, Any]
    manner: Manner
    stop_at: int | None = None  # where in the undisturbed text the stop string is taken from
    eos_after: int | None = None

    @property
    def has_deadline(self) -> bool:
        return "timeout" in self.body

    def __str__(self) -> str:
        shown = {key: value for key, value in self.body.items() if key not in _PROMPTS}
        return f"{self.path} {shown} {self.manner}"


def draw_case(rng: random.Random, *, tokens: tuple[int, int]) -> Case:
    """A request that says what real ones say, in every mixture."""
    chat = rng.random() < 0.3
    max_tokens = rng.randint(*tokens)
    body: dict[str, Any] = {
        "max_tokens": max_tokens,
        "return_token_ids": True,
        "stream": rng.random() < 0.85,
        "temperature": rng.choice([0, 0.7, 1.3]),
        "seed": rng.randrange(1 << 31),
    }
    if body["temperature"]:
        body |= {"top_p": rng.choice([0.9, 1.0]), "presence_penalty": rng.choice([0, 0.5])}
    text = _draw_prompt(rng)
    body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    if rng.random() < 0.1:
        body["n"] = rng.randint(2, 3)
    if rng.random() < 0.15:
        body |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    if rng.random() < 0.03:
        body["timeout"] = rng.uniform(0.3, 2.0)
    eos_after = stop_at = None
    ending = rng.random()
    if ending < 0.15:
        eos_after = rng.randint(1, max_tokens)
        body |= {"logit_bias": {str(BYTE_EOS): 100}, "min_tokens": eos_after}
    elif ending < 0.35:
        stop_at = rng.randrange(max_tokens)
        body["include_stop_str_in_output"] = rng.random() < 0.5
    path = "/v1/chat/completions" if chat else "/v1/completions"
    return Case(path, body, _draw_manner(rng, max_tokens), stop_at, eos_after)


def with_stop(case: Case, prompt_ids: list[int]) -> Case:
    """The case with a stop string that its text will hold, now that the prompt's ids are known."""
    if case.stop_at is None:
        return case
    text = expect(prompt_ids, case.body["max_tokens"]).text
    start = min(case.stop_at, len(text) - 1)
    stop = [text[start : start + 3], "no such text"]
    return Case(case.path, {**case.body, "stop": stop}, case.manner)


def prompt_ids_of(case: Case) -> list[int]:
    """The ids that the byte tokenizer makes of a case's prompt, by its own rules."""
    if "prompt" in case.body:
        return [BYTE_BOS, *case.body["prompt"].encode()]
    content = case.body["messages"][0]["content"]
    return [BYTE_BOS, *f"user: {content}\nassistant: ".encode()]


def _draw_prompt(rng: random.Random) -> str:
    length = rng.randint(5, 200) if rng.random() < 0.9 else rng.randint(600, 1500)
    prefix = _SHARED_PREFIX if rng.random() < 0.3 else ""
    return prefix + "x" + "".join(rng.choices(_ALPHABET, k=length)) + "x"


def _draw_manner(rng: random.Random, max_tokens: int) -> Manner:
    draw = rng.random()
    if draw < 0.06:
        return Manner("leave", after=rng.randint(0, max_tokens), reset=rng.random() < 0.5)
    if draw < 0.09:
        return Manner("trickle", pause=rng.uniform(0.01, 0.05))
    if draw < 0.12:
        return Manner("stop", after=rng.randint(1, max_tokens), pause=rng.uniform(2, 5))
    return Manner("eager")


class Verdict:
    """What is wrong with an answer, and the tokens that were lost or doubled."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.lost = 0
        self.doubled = 0

    def require(self, holds: bool, problem: str) -> None:
        if not holds:
            self.problems.append(problem)


def judge(case: Case, prompt_ids: list[int], answer: Answer) -> Verdict:
    """Holds an answer against the undisturbed one."""
    verdict = Verdict()
    expected = expect(
        prompt_ids,
        case.body["max_tokens"],
        stop=case.body.get("stop", ()),
        include_stop=case.body.get("include_stop_str_in_output", False),
        eos_after=case.eos_after,
    )
    if answer.status != 200:
        by_rule = answer.status == _LATE_STATUS and case.has_deadline
        verdict.require(by_rule, f"status {answer.status}: {answer.error}")
        return verdict
    verdict.require(answer.prompt_ids in (None, prompt_ids), "the prompt's ids are not its own")
    _judge_ids(verdict, expected, answer)
    if answer.left:
        return verdict
    if answer.error:
        by_rule = case.has_deadline and answer.error.get("type") == _LATE_ERROR
        verdict.require(by_rule, f"the stream ended with {answer.error}")
        verdict.require(answer.dones == 1, f"{answer.dones} [DONE]s after an error")
        return verdict
    _judge_end(verdict, case, len(prompt_ids), expected, answer)
    return verdict


def _judge_ids(verdict: Verdict, expected: Expected, answer: Answer) -> None:
    """Every id so far must be the undisturbed one in its place."""
    for index, choice in answer.choices.items():
        ids = choice.ids
        if ids != expected.ids[: len(ids)]:
            parted = next(
                (i for i, (a, b) in enumerate(zip(ids, expected.ids, strict=False)) if a != b),
                len(expected.ids),
            )
            verdict.doubled += max(0, len(ids) - len(expected.ids)) or 1
            verdict.problems.append(f"choice {index} parts at token {parted} of {len(ids)}")
        if not expected.text.startswith(choice.text):
            verdict.problems.append(f"choice {index}: the text is not the undisturbed one")


def _judge_end(
    verdict: Verdict, case: Case, num_prompt: int, expected: Expected, answer: Answer
) -> None:
    n = case.body.get("n", 1)
    verdict.require(sorted(answer.choices) == list(range(n)), f"choices {sorted(answer.choices)}")
    for index, choice in answer.choices.items():
        if len(choice.ids) < len(expected.ids):
            verdict.lost += len(expected.ids) - len(choice.ids)
            verdict.problems.append(f"choice {index}: {len(choice.ids)} of {len(expected.ids)} ids")
        verdict.require(choice.text == expected.text, f"choice {index}: text {choice.text!r}")
        ends = [(expected.finish_reason, expected.stop_reason)]
        verdict.require(choice.ends == ends, f"choice {index}: ends {choice.ends}, not {ends}")
        if case.body.get("logprobs"):
            verdict.require(
                choice.logprobs == expected.logprobs, f"choice {index}: log-probabilities differ"
            )
    verdict.require(answer.dones == (1 if case.body["stream"] else 0), f"{answer.dones} [DONE]s")
    usage = (num_prompt, n * len(expected.ids))
    verdict.require(answer.usage == usage, f"usage {answer.usage}, not {usage}")
