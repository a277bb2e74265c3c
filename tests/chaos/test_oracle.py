"""The oracle of the chaos suite against the engine's own."""

from __future__ import annotations

from services.common.model_metadata import BYTE_EOS
from services.worker.engine.fake import allowed_ids, fake_tokens
from tests.chaos.oracle import expect, tokens_and_scores


def test_the_tokens_are_those_of_the_engine() -> None:
    for prompt in ([65], list(b"The capital of France is"), list(range(256)) * 3):
        tokens, _ = tokens_and_scores(prompt, 200)
        assert tokens == fake_tokens(prompt, 200, allowed_ids("byte"))


def test_stop_strings_and_forced_ends_follow_the_contract() -> None:
    prompt = list(b"hello")
    whole = expect(prompt, 50)
    assert (len(whole.ids), whole.finish_reason, whole.stop_reason) == (50, "length", None)
    stop = whole.text[20:23]
    cut = expect(prompt, 50, stop=[stop])
    assert (cut.text, len(cut.ids)) == (whole.text[:20], 23)
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert expect(prompt, 50, stop=[stop], include_stop=True).text == whole.text[:23]
    ended = expect(prompt, 50, eos_after=7)
    assert ended.ids == [*whole.ids[:7], BYTE_EOS]
    assert (ended.text, ended.finish_reason) == (whole.text[:7], "stop")
