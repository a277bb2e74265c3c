"""The story of a request: encode, check, pick a worker, submit, stream, finish or abort.

`start` tells it up to the worker's acceptance. From there `services.gateway.live` has
the stream and its end, and `services.gateway.placement` the way to other instances.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from protos import tokenizer_pb2
from services.common import logs
from services.common.errors import ContextLengthExceeded, InvalidRequest, ShoalError
from services.common.tracing import NO_TRACE, TraceContext
from services.gateway import spans, to_proto
from services.gateway.dialect import reasoning_state
from services.gateway.domain import (
    ChatPrompt,
    GenerationRequest,
    ReasoningState,
    TextPrompt,
    TokenPrompt,
)
from services.gateway.live import Host, LiveGeneration
from services.gateway.offload import LARGE_COUNT, sized
from services.gateway.peers.catalog import Model


async def start(host: Host, request: GenerationRequest) -> LiveGeneration:
    """Returns once a worker has accepted every choice.

    Raises what `services.gateway.domain.Gateway.start` lists. If it raises or is
    cancelled, nothing of the request is left anywhere.
    """
    span, request = spans.begin(host.tracing, request)
    logs.bind(request_id=request.request_id, trace_id=span.context.trace_id)
    generation = LiveGeneration(host, request)
    failure = "cancelled"
    try:
        host.admit(generation)
        await _submit(host, generation)
        generation.span = span
    except ShoalError as error:
        failure = error.code.name.lower()
        host.metrics.count_error(error)
        raise
    finally:
        if generation.span is None:
            span.end(failure)
            generation.tell_refused(failure)
    return generation


async def _submit(host: Host, generation: LiveGeneration) -> None:
    """Takes an admitted request up to its acceptance, or ends it."""
    request = generation.request
    accepted = False
    try:
        async with generation.before_acceptance():
            model = await host.fleet.find_model(request.model, host.hold_timeout)
            prompt_ids, generation.reasoning = await encode(host, model, request)
            prompt_ids = truncated(request, model, prompt_ids)
            max_tokens = check_prompt(request, model, prompt_ids)
            await generation.submit(model, prompt_ids, max_tokens)
        generation.accept()
        accepted = True
    except TimeoutError:
        raise generation.why_not_accepted() from None
    finally:
        if not accepted:
            generation.close()


async def encode(
    host: Host, model: Model, request: GenerationRequest
) -> tuple[Sequence[int], ReasoningState]:
    """A prompt's ids, and what it says of the reasoning that follows; ids are ids already.

    Raises ContextLengthExceeded for one that is far too long and is not to be cut.
    """
    prompt = request.prompt
    if isinstance(prompt, TokenPrompt):
        return prompt.token_ids, "unknown"
    limit = model.max_model_len if request.max_prompt_tokens is None else None
    message = await encode_message(prompt, trace=request.trace, max_model_len=limit)
    answer = await host.fleet.encode(model, message, host.hold_timeout, host.max_moves)
    return answer.token_ids, reasoning_state(answer)


async def encode_message(
    prompt: ChatPrompt | TextPrompt,
    *,
    return_token_strs: bool = False,
    trace: TraceContext = NO_TRACE,
    max_model_len: int | None = None,
) -> tokenizer_pb2.EncodeRequest:
    """A prompt for a tokenizer; a long conversation is converted off the loop."""
    size = len(prompt.messages) if isinstance(prompt, ChatPrompt) else 0
    convert = partial(
        to_proto.encode_request,
        prompt,
        return_token_strs=return_token_strs,
        trace=trace,
        max_model_len=max_model_len,
    )
    return await sized(size, LARGE_COUNT, convert)


def truncated(request: GenerationRequest, model: Model, prompt_ids: Sequence[int]) -> Sequence[int]:
    """The last ids of a prompt, as many as its request asks for at most."""
    most = request.max_prompt_tokens
    if most is None:
        return prompt_ids
    if most == 0:  # what leaves room for the tokens asked for
        most = max(model.max_model_len - (request.sampling.max_tokens or 1), 1)
    return prompt_ids[-most:]


def check_prompt(request: GenerationRequest, model: Model, prompt_ids: Sequence[int]) -> int:
    """Checks what depends on the model; returns how many tokens may be generated.

    Raises InvalidRequest or ContextLengthExceeded.
    """
    sampling = request.sampling
    param = "messages" if isinstance(request.prompt, ChatPrompt) else "prompt"
    if not prompt_ids:
        raise InvalidRequest(f"{param}: there is not one token in the prompt", param=param)
    room = model.max_model_len - len(prompt_ids)
    if room < 1:
        raise ContextLengthExceeded.of(len(prompt_ids), model.max_model_len, param=param)
    for name, ids in (
        (param, prompt_ids),
        ("logit_bias", tuple(sampling.logit_bias)),
        ("stop_token_ids", sampling.stop_token_ids),
    ):
        if ids and not (min(ids) >= 0 and max(ids) < model.vocab_size):
            raise InvalidRequest(
                f"{name}: a token id is outside the vocabulary of {model.vocab_size}", param=name
            )
    return room if sampling.max_tokens is None else min(sampling.max_tokens, room)
