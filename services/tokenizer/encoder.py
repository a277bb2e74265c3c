"""Prompts to token ids.

Two steps, so that many prompts can share the second: `prepare` renders and checks, and
`encode` turns prepared texts into ids in one call that releases the GIL. Both may run on
any thread. Knows nothing of queues or sessions.

Text prompts are encoded as Hugging Face and vLLM encode them: control tokens written in
them are control tokens. In conversations only the template's own are: each control token
in user text becomes a token of its own while the whole is encoded, and its plain spelling
is spliced in for it after. A conversation without any is encoded as it stands.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer

from services.common.errors import ContextLengthExceeded, InvalidRequest, TooLarge
from services.common.text.vocabulary import Vocabulary
from services.tokenizer.chat_template import ChatTemplate, Conversation
from services.tokenizer.control import ControlGuard, control_tokens
from services.tokenizer.dialect import ReasoningState, reasoning_state
from services.tokenizer.token_floor import TokenFloor

MAX_TEXT_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Prepared:
    """A text to encode. `literals` are control tokens (start, end) that are plain text."""

    text: str
    add_special_tokens: bool
    literals: Sequence[tuple[int, int]] = ()
    reasoning: ReasoningState = "unknown"


class Encoder:
    """One model's way from prompts to ids."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Compiles the chat template. Raises StartupError if it is not valid."""
        self.metadata = vocabulary.metadata
        tokens = control_tokens(vocabulary.tokenizer)
        self._encode = _SplicingEncoder(vocabulary.tokenizer, tokens)
        self._tokenizer = vocabulary.tokenizer
        self._floor = TokenFloor.of(vocabulary.tokenizer)
        source = vocabulary.metadata.chat_template
        self._template = (
            None
            if source is None
            else ChatTemplate(source, vocabulary.special_tokens, ControlGuard(tokens))
        )

    def prepare_text(
        self, text: str, *, add_special_tokens: bool = True, max_model_len: int | None = None
    ) -> Prepared:
        """A text prompt. Raises TooLarge, InvalidRequest for a lone surrogate, and
        ContextLengthExceeded if the text's length alone shows that it leaves no room for a
        token in `max_model_len`."""
        self._check_text(text, max_model_len, param="prompt")
        return Prepared(text, add_special_tokens)

    def prepare_chat(
        self, conversation: Conversation, *, max_model_len: int | None = None
    ) -> Prepared:
        """Renders a conversation.

        Raises InvalidRequest if the template refuses it or there is none, and what
        `prepare_text` raises.
        """
        if self._template is None:
            raise InvalidRequest("this model has no chat template", param="messages")
        if not conversation.messages:
            raise InvalidRequest("there are no messages", param="messages")
        restored = self._template.render(conversation)
        self._check_text(restored.text, max_model_len, param="messages")
        state = reasoning_state(restored.text)
        return Prepared(restored.text, False, restored.literals, state)

    def encode(self, prepared: Sequence[Prepared]) -> list[list[int]]:
        """The ids of each text. The GIL is free while the library works."""
        ids: list[list[int]] = [[] for _ in prepared]
        for add_special_tokens in (False, True):
            chosen = [
                i for i, p in enumerate(prepared) if p.add_special_tokens is add_special_tokens
            ]
            if chosen:
                answers = self._encode([prepared[i] for i in chosen], add_special_tokens)
                for i, answer in zip(chosen, answers, strict=True):
                    ids[i] = answer
        return ids

    def check_ids(self, token_ids: Sequence[int]) -> None:
        """Raises InvalidRequest if an id has no row in the embedding."""
        worst = max(token_ids, default=0)
        if worst >= self.metadata.vocab_size:
            raise InvalidRequest(
                f"token id {worst} is not in the vocabulary of {self.metadata.vocab_size}",
                param="prompt",
            )

    def spell(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary spells it; empty for an id without a token."""
        spelling = self._tokenizer.id_to_token
        return [spelling(token_id) or "" for token_id in token_ids]

    def _check_text(self, text: str, max_model_len: int | None, *, param: str) -> None:
        size = _num_bytes(text, param=param)
        if size > MAX_TEXT_BYTES:
            raise TooLarge(
                f"the text has {size} bytes; at most {MAX_TEXT_BYTES} can be encoded", param=param
            )
        # A text of fewer bytes than that need not be looked at.
        if max_model_len is not None and self._floor is not None and size >= max_model_len:
            least = self._floor.least(text)
            if least >= max_model_len:
                raise ContextLengthExceeded.of(least, max_model_len, param=param, at_least=True)


class _SplicingEncoder:
    """Encodes with some control tokens as plain text."""

    def __init__(self, tokenizer: Tokenizer, tokens: frozenset[str]) -> None:
        state = tokenizer.to_str()
        # The stand-in for a literal: a special token that no client can guess.
        self._stand_in = "".join(chr(0xE000 + byte) for byte in secrets.token_bytes(12))
        self._whole = Tokenizer.from_str(state)
        stand_in = AddedToken(self._stand_in, special=True, normalized=False)
        self._whole.add_special_tokens([stand_in])
        stand_in_id = self._whole.token_to_id(self._stand_in)
        assert stand_in_id is not None
        self._stand_in_id = stand_in_id
        self._plain = _without_control_tokens(json.loads(state), tokens)
        self._control_ids = {tokenizer.token_to_id(token) for token in tokens}
        self._spellings: dict[str, list[int]] = {}

    def __call__(self, prepared: Sequence[Prepared], add_special_tokens: bool) -> list[list[int]]:
        texts = [self._with_stand_ins(p) if p.literals else p.text for p in prepared]
        # encode() would hold the GIL; the fast form leaves the offsets out.
        encodings = self._whole.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [
            self._spliced(encoding.ids, p) if p.literals else encoding.ids
            for encoding, p in zip(encodings, prepared, strict=True)
        ]

    def _with_stand_ins(self, prepared: Prepared) -> str:
        parts: list[str] = []
        end = 0
        for start, stop in prepared.literals:
            parts += [prepared.text[end:start], self._stand_in]
            end = stop
        return "".join([*parts, prepared.text[end:]])

    def _spliced(self, ids: list[int], prepared: Prepared) -> list[int]:
        literals = iter(prepared.literals)
        result: list[int] = []
        for token_id in ids:
            if token_id == self._stand_in_id:
                start, end = next(literals)
                result += self._spell(prepared.text[start:end])
            else:
                result.append(token_id)
        return result

    def _spell(self, literal: str) -> list[int]:
        """A control token's ids as plain text."""
        ids = self._spellings.get(literal)
        if ids is None:
            ids = self._encode_inside(literal)
            if self._control_ids & set(ids):  # some vocabularies hold it as a plain word too
                ids = [id for character in literal for id in self._encode_inside(character)]
            self._spellings[literal] = ids
        return ids

    def _encode_inside(self, text: str) -> list[int]:
        """Encodes behind a line end, so that no blank is added for the start of a text."""
        before, ids = (
            encoding.ids
            for encoding in self._plain.encode_batch_fast(
                ["\n", "\n" + text], add_special_tokens=False
            )
        )
        return ids[len(before) :]


def _without_control_tokens(state: dict[str, Any], tokens: frozenset[str]) -> Tokenizer:
    """A copy of a tokenizer to which control tokens are ordinary text."""
    for token in state["added_tokens"]:
        token["special"] = token["special"] or token["content"] in tokens
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.encode_special_tokens = True
    return tokenizer


def _num_bytes(text: str, *, param: str) -> int:
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest("the text holds a lone surrogate, which is no text", param=param)
