"""POST /v1/completions: one prompt or many in, and the answer out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from services.common.errors import InvalidRequest, ShoalError
from services.gateway.domain import Chunk, Gateway, Prompt, TextPrompt, TokenPrompt, Usage
from services.gateway.openai.answer import (
    Choice,
    Head,
    Job,
    failure_events,
    usage_event,
    usage_fields,
)
from services.gateway.openai.decode import (
    Caller,
    decode,
    generation_request,
    integer,
    refuse_common,
    sampling,
)
from services.gateway.openai.fanout import FanOut
from services.gateway.openai.logprobs import CompletionLogprobs, join
from services.gateway.openai.schema import CompletionBody
from services.gateway.openai.structured import grammar_of
from services.gateway.sse import DONE, json_text
from services.gateway.validate import MAX_CHOICES

DEFAULT_MAX_TOKENS = 16
MAX_LOGPROBS = 5


async def parse_completion(
    raw: bytes, caller: Caller, gateway: Gateway, *, max_choices: int
) -> Job:
    """Decodes and checks a body; `max_choices` bounds prompts times n.

    Raises:
        InvalidRequest, Unsupported.
    """
    body = decode(raw, CompletionBody)
    refuse_common(body)
    prompts = _prompts(body, max_choices)
    given = integer("max_tokens", body.max_tokens)
    max_tokens = DEFAULT_MAX_TOKENS if given is None else given
    if max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens may be 0 only with echo", param="max_tokens")
    logprobs = integer("logprobs", body.logprobs)
    if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
        raise InvalidRequest(
            f"logprobs must be an integer from 0 to {MAX_LOGPROBS}", param="logprobs"
        )
    options = sampling(
        body,
        # To score a prompt the engine makes one token, which the answer leaves out.
        max_tokens=1 if max_tokens == 0 else max_tokens,
        logprobs=logprobs,
        prompt_logprobs=logprobs if body.echo else None,
        grammar=grammar_of(body),
    )
    if len(prompts) * min(integer("n", body.n) or 1, MAX_CHOICES) > max_choices:
        raise _too_many(max_choices)
    requests = tuple(generation_request(body, caller, prompt, options) for prompt in prompts)
    return Job(
        requests,
        bool(body.stream),
        lambda gateway, whole: CompletionAnswer(body, prompts, gateway, whole),
    )


def _too_many(max_choices: int) -> InvalidRequest:
    return InvalidRequest(f"prompts times n must be at most {max_choices}", param="prompt")


def _prompts(body: CompletionBody, max_prompts: int) -> list[Prompt]:
    """The prompts of a body: a text, texts, ids, or lists of ids."""
    prompt = body.prompt
    special = True if body.add_special_tokens is None else body.add_special_tokens
    if isinstance(prompt, str):
        return [TextPrompt(prompt, special)]
    if not prompt:
        raise InvalidRequest("prompt must not be an empty list", param="prompt")
    # Counted before anything is made of them: a body has room for millions.
    if len(prompt) > max_prompts and not isinstance(prompt[0], int):
        raise _too_many(max_prompts)
    texts = [item for item in prompt if isinstance(item, str)]
    if len(texts) == len(prompt):
        return [TextPrompt(text, special) for text in texts]
    token_ids = [item for item in prompt if isinstance(item, int)]
    if len(token_ids) == len(prompt):
        return [TokenPrompt(tuple(token_ids))]
    lists = [item for item in prompt if isinstance(item, list)]
    if len(lists) == len(prompt):
        return [TokenPrompt(tuple(item)) for item in lists]
    raise InvalidRequest(
        "prompt must be a text, texts, token ids, or lists of token ids", param="prompt"
    )


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
        self._token_ids = bool(body.return_token_ids)
        self._usage = bool(body.stream_options and body.stream_options.include_usage)
        self._head = Head.new("cmpl", "text_completion", gateway, self._model)
        self._event = self._head.event_prefix()
        self._end = b'}],"usage":null}\n\n' if self._usage else b"}]}\n\n"
        self._text_end = b',"logprobs":null,"finish_reason":null' + self._end
        self._started: dict[int, bytes] = {}  # choice -> its event up to the text
        self._scores: dict[int, CompletionLogprobs] = {}  # choice -> where its offsets stand
        self._echoes: dict[int, str] = {}  # prompt -> its text

    def first_events(self) -> bytes:
        return b""

    async def events(self, chunk: Chunk) -> bytes:
        """The events of a chunk: the echoed prompt if it is the choice's first, and itself."""
        index = chunk.index
        before = b""
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
        logprobs = self._whole.generations[index // self._whole.n].prompt_logprobs or ()
        return await self._scores_of(index).add(logprobs, starts_prompt=True)
