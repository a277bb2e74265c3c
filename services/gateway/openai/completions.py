"""POST /v1/completions: one prompt or many in, and the answer out."""

from __future__ import annotations

from services.common.errors import InvalidRequest
from services.gateway.domain import Gateway, Prompt, TextPrompt, TokenPrompt
from services.gateway.offload import LARGE_BYTES, sized
from services.gateway.openai import fields
from services.gateway.openai.answer import (
    Job,
)
from services.gateway.openai.completion_answer import CompletionAnswer
from services.gateway.openai.decode import (
    Caller,
    decode,
    generation_request,
    integer,
    refuse_in,
    sampling,
)
from services.gateway.openai.schema import CompletionBody
from services.gateway.openai.structured import grammar_of
from services.gateway.validate import MAX_CHOICES

DEFAULT_MAX_TOKENS = 16
MAX_LOGPROBS = 5
MAX_PROMPT_LOGPROBS = 20


async def parse_completion(
    raw: bytes, caller: Caller, gateway: Gateway, *, max_choices: int
) -> Job:
    """Decodes and checks a body; `max_choices` bounds prompts times n.

    Raises:
        InvalidRequest, Unsupported.
    """
    body = await sized(len(raw), LARGE_BYTES, lambda: decode(raw, CompletionBody))
    refuse_in(body, fields.COMPLETIONS)
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
        prompt_logprobs=_num_prompt_logprobs(body, logprobs),
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


def _num_prompt_logprobs(body: CompletionBody, logprobs: int | None) -> int | None:
    """How many the prompt needs, for itself or for its echo."""
    asked = integer("prompt_logprobs", body.prompt_logprobs)
    if asked is not None:
        if not 0 <= asked <= MAX_PROMPT_LOGPROBS:
            raise InvalidRequest(
                f"prompt_logprobs must be an integer from 0 to {MAX_PROMPT_LOGPROBS}",
                param="prompt_logprobs",
            )
        if body.stream:
            raise InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    wanted = [count for count in (asked, logprobs if body.echo else None) if count is not None]
    return max(wanted, default=None)


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
