"""Writes text completions: `text_completion` objects, as events or as one body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from services.common.errors import ShoalError
from services.gateway.domain import Chunk, Gateway, Prompt, TextPrompt, TokenLogprobs, Usage
from services.gateway.openai.answer import (
    Choice,
    Head,
    failure_events,
    usage_end,
    usage_event,
    usage_fields,
)
from services.gateway.openai.decode import integer
from services.gateway.openai.fanout import FanOut
from services.gateway.openai.logprobs import CompletionLogprobs, join, prompt_scores
from services.gateway.openai.schema import CompletionBody
from services.gateway.sse import DONE, json_text


class CompletionAnswer:
    """Writes `text_completion` objects, as events or as one body."""

    def __init__(
        self, body: CompletionBody, prompts: Sequence[Prompt], gateway: Gateway, whole: FanOut
    ) -> None:
        self._gateway = gateway
        self._prompts = prompts
        self._whole = whole
        self._model = body.model or ""
        self._echo = bool(body.echo)
        self._prompt_only = body.max_tokens == 0
        self._logprobs = body.logprobs is not None
        self._num_logprobs = int(body.logprobs or 0)
        self._prompt_logprobs = integer("prompt_logprobs", body.prompt_logprobs)
        self._token_ids = bool(body.return_token_ids)
        self._usage = bool(body.stream_options and body.stream_options.include_usage)
        self._head = Head.new("cmpl", "text_completion", gateway, self._model)
        self._event = self._head.event_prefix()
        counts_on = bool(body.stream_options and body.stream_options.counts_on)
        self._counting = whole if counts_on else None
        self._set_end(usage_end(None) if self._usage else b"}\n\n")
        self._started: dict[int, bytes] = {}  # choice -> its event up to the text
        self._scores: dict[int, CompletionLogprobs] = {}  # choice -> where its offsets stand
        self._echoes: dict[int, str] = {}  # prompt -> its text

    def first_events(self) -> bytes:
        return b""

    async def events(self, chunk: Chunk) -> bytes:
        """The events of a chunk: the echoed prompt if it is the choice's first, and itself."""
        index = chunk.index
        before = b""
        self._count()
        start = self._started.get(index)
        if start is None:
            start = self._event + b',"choices":[{"index":%d,"text":' % index
            self._started[index] = start
            before = await self._prompt_event(index, start)
        if self._prompt_only:
            if chunk.finish_reason is None:
                return before
            chunk = Chunk(index, "", (), finish_reason="length")
        plain = not (chunk.logprobs or chunk.finish_reason or (self._token_ids and chunk.token_ids))
        if plain:
            return before + start + json_text(chunk.text) + self._text_end if chunk.text else before
        return before + start + json_text(chunk.text) + await self._detailed_end(chunk)

    def text_event(self, index: int, text: str) -> bytes | None:
        start = self._started.get(index)
        if start is None or self._token_ids or self._prompt_only or self._counting is not None:
            return None
        return start + json_text(text) + self._text_end

    def last_events(self, usage: Usage) -> bytes:
        if not self._usage:
            return DONE
        return usage_event(self._event, usage_fields(self._counted(usage))) + DONE

    def failure(self, error: ShoalError) -> bytes:
        return failure_events(error)

    async def body(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        answer = self._head.fields()
        answer["choices"] = [await self._choice(choice) for choice in choices]
        answer["usage"] = usage_fields(self._counted(usage))
        return msgspec.json.encode(answer)

    async def _choice(self, choice: Choice) -> dict[str, Any]:
        if self._prompt_only:
            choice = Choice(choice.index, finish_reason="length")
        echo = await self._echo_text(choice.index) if self._echo else ""
        fields: dict[str, Any] = {
            "index": choice.index,
            "text": echo + choice.text,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._logprobs:
            pieces = [await self._prompt_scores(choice.index)] if self._echo else []
            pieces.append(await self._scores_of(choice.index).add(choice.logprobs))
            fields["logprobs"] = join(pieces)
        if self._token_ids:
            fields["token_ids"] = choice.token_ids
            fields["prompt_token_ids"] = self._prompt_token_ids(choice.index)
        if self._prompt_logprobs is not None:
            scores = self._scores_of_prompt(choice.index)
            fields["prompt_logprobs"] = await prompt_scores(
                self._gateway, self._model, self._prompt_logprobs, scores
            )
        return fields

    async def _prompt_event(self, index: int, start: bytes) -> bytes:
        """What stands before a choice's first chunk; empty without echo and token ids."""
        if not (self._echo or self._token_ids):
            return b""
        text = await self._echo_text(index) if self._echo else ""
        end = b',"logprobs":null'
        if self._echo and self._logprobs:
            end = b',"logprobs":' + msgspec.json.encode(await self._prompt_scores(index))
        if self._token_ids:
            ids = self._prompt_token_ids(index)
            end += b',"token_ids":[],"prompt_token_ids":' + msgspec.json.encode(ids)
        return start + json_text(text) + end + b',"finish_reason":null' + self._end

    async def _detailed_end(self, chunk: Chunk) -> bytes:
        end = b',"logprobs":null'
        if chunk.logprobs:
            piece = await self._scores_of(chunk.index).add(chunk.logprobs)
            end = b',"logprobs":' + msgspec.json.encode(piece)
        if self._token_ids:
            end += b',"token_ids":' + msgspec.json.encode(list(chunk.token_ids))
        end += b',"finish_reason":' + msgspec.json.encode(chunk.finish_reason)
        if chunk.finish_reason is not None:
            end += b',"stop_reason":' + msgspec.json.encode(chunk.stop_reason)
        return end + self._end

    def _set_end(self, end: bytes) -> None:
        self._end = b"}]" + end
        self._text_end = b',"logprobs":null,"finish_reason":null' + self._end

    def _count(self) -> None:
        """The events to come have the counts so far, if they were asked for."""
        if self._counting is not None:
            self._set_end(usage_end(usage_fields(self._counted(self._counting.usage))))

    def _counted(self, usage: Usage) -> Usage:
        if self._prompt_only:
            return Usage(usage.prompt_tokens, 0, usage.cached_tokens)
        return usage

    def _prompt_token_ids(self, index: int) -> list[int]:
        return list(self._whole.generations[index // self._whole.n].prompt_token_ids)

    async def _echo_text(self, index: int) -> str:
        position = index // self._whole.n
        if position not in self._echoes:
            prompt = self._prompts[position]
            if isinstance(prompt, TextPrompt):
                self._echoes[position] = prompt.text
            else:
                ids = self._whole.generations[position].prompt_token_ids
                self._echoes[position] = await self._gateway.detokenize(self._model, ids)
        return self._echoes[position]

    def _scores_of(self, index: int) -> CompletionLogprobs:
        if index not in self._scores:
            self._scores[index] = CompletionLogprobs(self._gateway, self._model)
        return self._scores[index]

    async def _prompt_scores(self, index: int) -> dict[str, list[Any]]:
        """The echoed prompt's log-probabilities."""
        most = self._num_logprobs  # there may be more, for prompt_logprobs
        scores = [replace(entry, top=entry.top[:most]) for entry in self._scores_of_prompt(index)]
        return await self._scores_of(index).add(scores, starts_prompt=True)

    def _scores_of_prompt(self, index: int) -> Sequence[TokenLogprobs]:
        return self._whole.generations[index // self._whole.n].prompt_logprobs or ()
