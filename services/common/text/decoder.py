"""Many texts growing from token ids at once, each watched for its stop strings.

The core of the detokenizer service, which the gateway also uses in its own process where there
is no such service.
It owns the state of every open text, by handle, and knows nothing of gRPC. A text's
state is a function of its ids, so another instance rebuilds it from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.text.pieces import Pieces, PieceStream, build_pieces
from services.common.text.stop import StopMatcher
from services.common.text.vocabulary import Vocabulary, build_vocabulary


@dataclass(slots=True)
class TextDelta:
    """News of one text.

    `ids_consumed` counts the ids taken in, from the first; when a stop string matched
    (`stop`), the ids that the match needed. `held_chars` is how many decoded characters
    are held back because they may become part of a stop string.
    """

    text: str
    ids_consumed: int
    held_chars: int = 0
    stop: str | None = None
    ended: bool = False


class TextDecoder:
    """Open texts of one tokenizer, keyed by handle. Not for use by several threads.

    An unknown handle is ignored everywhere (None is answered): it was closed, or its
    text ended with a stop string, while ids for it were under way.
    """

    def __init__(self, pieces: Pieces, vocab_size: int) -> None:
        self._pieces = pieces
        self._texts: dict[int, _Text] = {}
        self.vocab_size = vocab_size

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> TextDecoder:
        """Builds the tables of a vocabulary; takes a fraction of a second."""
        return cls(build_pieces(vocabulary.tokenizer), vocabulary.metadata.vocab_size)

    def __len__(self) -> int:
        return len(self._texts)

    def open(
        self,
        handle: int,
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        replay_ids: Sequence[int] = (),
        skip_chars: int = 0,
    ) -> TextDelta:
        """Begins a text, replacing one that has the handle.

        `replay_ids` are taken in, and the first `skip_chars` characters of the text
        are not given out (again).
        """
        matcher = StopMatcher(stop) if any(stop) else None
        stream = self._pieces.stream(skip_special_tokens=skip_special_tokens)
        self._texts[handle] = _Text(stream, matcher, include_stop_str_in_output, skip_chars)
        delta = self.feed(handle, replay_ids)
        assert delta is not None
        return delta

    def feed(self, handle: int, token_ids: Sequence[int]) -> TextDelta | None:
        """Takes ids in. If a stop string matched, the text has ended and is forgotten."""
        text = self._texts.get(handle)
        if text is None:
            return None
        delta = text.feed(token_ids)
        if delta.ended:
            del self._texts[handle]
        return delta

    def end(self, handle: int) -> TextDelta | None:
        """The ids are complete: gives out what was held back, and forgets the text."""
        text = self._texts.pop(handle, None)
        return None if text is None else text.end()

    def close(self, handle: int) -> None:
        """Forgets a text that nobody waits for."""
        self._texts.pop(handle, None)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a list of ids at once."""
        stream = self._pieces.stream(skip_special_tokens=skip_special_tokens)
        return stream.push(token_ids) + stream.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """One token's bytes, perhaps part of a character; empty if there is no such id."""
        return self._pieces.token_bytes(token_id)

    def session(self) -> TextDecoder:
        """A decoder with its own handles that shares this one's tables."""
        return TextDecoder(self._pieces, self.vocab_size)


def build_decoder(model: str) -> TextDecoder:
    """The decoder of a model named as for `--model`; takes a fraction of a second.

    Raises StartupError if there is no such model or its tokenizer is not supported.
    """
    return TextDecoder.of(build_vocabulary(model))


class _Text:
    """One text.

    0 .. sent (given out) .. length (decoded)
         |<---- held ----->|
    """

    __slots__ = (
        "_consumed",
        "_held",
        "_include_stop",
        "_match_consumed",
        "_matcher",
        "_sent",
        "_settled",
        "_skip",
        "_stream",
    )

    def __init__(
        self, stream: PieceStream, matcher: StopMatcher | None, include_stop: bool, skip: int
    ) -> None:
        self._stream = stream
        self._matcher = matcher
        self._include_stop = include_stop
        self._skip = skip  # characters the client already has, still to be passed over
        self._consumed = 0
        self._sent = 0
        self._held = ""
        self._match_consumed = 0  # ids that the matcher's candidate needed
        self._settled = False

    def feed(self, token_ids: Sequence[int]) -> TextDelta:
        if self._matcher is None:
            self._consumed += len(token_ids)
            return TextDelta(self._unseen(self._stream.push(token_ids)), self._consumed)
        text = ""
        for token_id in token_ids:
            self._consumed += 1
            text += self._watch(self._matcher, self._stream.push((token_id,)))
            if self._settled:
                return self._finish(self._matcher, text)
        return TextDelta(self._unseen(text), self._consumed, len(self._held))

    def end(self) -> TextDelta:
        rest = self._stream.flush()
        if self._matcher is None:
            return TextDelta(self._unseen(rest), self._consumed, ended=True)
        text = self._watch(self._matcher, rest)
        if self._matcher.candidate is not None:
            return self._finish(self._matcher, text)
        return TextDelta(self._unseen(text + self._held), self._consumed, ended=True)

    def _watch(self, matcher: StopMatcher, piece: str) -> str:
        """Takes decoded text in; answers what can be in no match any more."""
        if not piece:
            return ""
        before = matcher.candidate
        self._held = self._held + piece if self._held else piece
        self._settled = matcher.feed(piece)
        if matcher.candidate is not before:
            self._match_consumed = self._consumed
        return self._release(matcher.safe_length)

    def _finish(self, matcher: StopMatcher, text: str) -> TextDelta:
        """The last delta of a text with a stop string in it."""
        match = matcher.candidate
        assert match is not None
        text += self._release(match.end if self._include_stop else match.start)
        return TextDelta(self._unseen(text), self._match_consumed, stop=match.stop, ended=True)

    def _release(self, length: int) -> str:
        """The held text up to a position of the whole text."""
        count = length - self._sent
        self._sent = length
        text = self._held
        if count == len(text):
            self._held = ""
            return text
        self._held = text[count:]
        return text[:count]

    def _unseen(self, text: str) -> str:
        if not self._skip:
            return text
        seen = min(self._skip, len(text))
        self._skip -= seen
        return text[seen:]
