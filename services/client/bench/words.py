"""Prompts of a wanted length, in tokens, for a server whose tokenizer may be unknown.

Prompts are random short English words, of about one token each for most models. How many
tokens a word has is asked of the server, or of a tokenizer where one was given; then lengths
are exact.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

_TEXT = (
    "able about above act add after again age air all also and animal answer any appear area arm"
    " art ask away back ball base bed before best better big bird black blue boat body book both"
    " box boy bring build busy buy call came can car care case cat cause change city class clear"
    " close cold color come cook cool copy corn course cover cross cry cut dark day deep did door"
    " down draw dream drive dry each early earth east easy eat edge end even ever eye face fact"
    " fall family far farm fast father fear feel feet few field fig fill final find fine fire"
    " fish five fly food foot force form found four free friend front full game gave girl give"
    " glass gold gone good grass great green ground group grow half hand hard have head hear heart"
    " heat heavy help here high hill hold home horse hot hour house ice idea inch island job join"
    " jump just keep kind king know land large last late law lay lead learn leave left leg less"
    " let letter life light like line list little live long look low made main make man many map"
    " mark mean men mile mind minute miss money moon more most mother move much music name near"
    " need new next night north note number object ocean off often old once one only open order"
    " other our over own page paper part pass past people person piece place plain plan plane"
    " plant play point power press pull push put question quick quiet rain ran reach read ready"
    " real red rest rich ride right river road rock room round rule run sail same saw say school"
    " sea second see self send set seven shape she ship short show side sign simple sing sit six"
    " size sky sleep slow small snow some song soon sound south space stand star start state stay"
    " step still stone stop story street strong study such sun sure table tail take talk teach"
    " tell ten test thing think three time toward town travel tree true turn two under unit until"
    " use very voice wait walk wall want war warm watch water way week well west wheel white who"
    " wind winter wish wood word work world write year yes you young"
)
_WORDS = _TEXT.split()
_MAX_RESIZES = 8
_MAX_TRIES = 50  # of other words, where a word has several tokens


class Counter(Protocol):
    """Counts a text's tokens."""

    def count(self, text: str) -> int: ...


@dataclass(frozen=True, slots=True)
class TextMaker:
    """Makes texts of so many tokens: exactly with a counter, else by tokens a word."""

    tokens_per_word: float = 1.0
    counter: Counter | None = None

    def text(self, rng: random.Random, num_tokens: int) -> str:
        """Random words of `num_tokens` tokens, at least one word."""
        words = rng.choices(_WORDS, k=max(1, round(num_tokens / self.tokens_per_word)))
        if self.counter is not None:
            self._fit(words, rng, num_tokens, self.counter)
        return " ".join(words)

    def _fit(self, words: list[str], rng: random.Random, num_tokens: int, counter: Counter) -> None:
        """Adds and drops words until their count is nearly right, then tries others in places."""
        excess = 0
        for _ in range(_MAX_RESIZES):
            excess = counter.count(" ".join(words)) - num_tokens
            change = round(abs(excess) / self.tokens_per_word)
            if change == 0 or (excess > 0 and len(words) == 1):
                break
            if excess > 0:
                del words[-min(change, len(words) - 1) :]
            else:
                words += rng.choices(_WORDS, k=change)
        for _ in range(_MAX_TRIES if excess else 0):
            place = rng.randrange(len(words))
            before, words[place] = words[place], rng.choice(_WORDS)
            now = counter.count(" ".join(words)) - num_tokens
            if now == 0:
                return
            if abs(now) > abs(excess):
                words[place] = before
            else:
                excess = now

    def length(self, text: str) -> int:
        """The tokens of a text; without a counter, at four characters a token."""
        return self.counter.count(text) if self.counter else max(1, round(len(text) / 4))


class ModelCounter:
    """A model's own tokenizer."""

    def __init__(self, model: str) -> None:
        """`model` is as for `shoal serve --model`, or "embedded". Raises StartupError."""
        from services.common.text.vocabulary import build_vocabulary

        self._tokenizer = build_vocabulary("" if model == "embedded" else model).tokenizer

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)


def counted(counter: Counter) -> TextMaker:
    """A maker whose words are measured with a counter."""
    return TextMaker(counter.count(_TEXT) / len(_WORDS), counter)
