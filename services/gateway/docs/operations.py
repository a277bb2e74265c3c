"""Every operation of the REST API, as the OpenAPI document lists them.

The routes themselves are in `services.gateway.http`; a test holds the two together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from services.gateway.docs import answers
from services.gateway.openai import schema
from services.gateway.openai.responses.schema import ResponsesBody
from services.gateway.watch import shapes

Kind = Literal["generation", "model", "operator", "probe"]
TEXT = "text/plain"


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path. `body` and `answer` are structs, or several to choose from;
    an `answer` of None is plain text."""

    method: Literal["get", "post", "delete"]
    path: str
    summary: str
    kind: Kind
    body: tuple[type, ...] = ()
    answer: type | tuple[type, ...] | None = None
    event: type | None = None  # of a stream

    @property
    def answers(self) -> tuple[type, ...]:
        """The structs of `answer`."""
        given = self.answer if isinstance(self.answer, tuple) else (self.answer,)
        return tuple(one for one in given if one is not None)

    description: str = ""


OPERATIONS = (
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer a conversation",
        "generation",
        (schema.ChatBody,),
        answers.ChatCompletion,
        answers.ChatCompletionChunk,
        "With `stream`, events of `chat.completion.chunk` objects, ended by `data: [DONE]`.",
    ),
    Operation(
        "post",
        "/v1/completions",
        "Continue a text",
        "generation",
        (schema.CompletionBody,),
        answers.TextCompletion,
        answers.TextCompletion,
        "With `stream`, events of `text_completion` objects, ended by `data: [DONE]`.",
    ),
    Operation(
        "post",
        "/v1/responses",
        "Answer items with items",
        "generation",
        (ResponsesBody,),
        answers.ResponseObject,
        answers.ResponseObject,
        "Nothing is stored. With `stream`, typed events from `response.created` to"
        " `response.completed`, `response.incomplete` or `response.failed`.",
    ),
    *(
        Operation(
            method,
            "/v1/responses/{id}",
            "Always 404: responses are not stored",
            "model",
        )
        for method in ("get", "post", "delete")
    ),
    Operation(
        "post",
        "/generate",
        "Continue a text, in the shapes of Mini-SGLang and SGLang",
        "generation",
        (schema.GenerateBody, schema.SGLangBody),
        (answers.GeneratedText, answers.SGLangText),
        answers.SGLangText,
        "With `prompt` it streams unless `stream` is false, and each event is a piece of the text."
        " With `text` or `input_ids` it streams if `stream` is true, each event is an object with"
        " the text so far, the last one the ids too, and `data: [DONE]` ends the stream.",
    ),
    Operation("get", "/v1/models", "List the models", "model", answer=answers.ModelListObject),
    Operation("get", "/v1/models/{id}", "Show a model", "model", answer=answers.ModelObject),
    Operation(
        "post",
        "/tokenize",
        "Turn a text or a conversation into token ids",
        "model",
        (schema.TokenizeTextBody, schema.TokenizeChatBody),
        answers.TokenizedObject,
    ),
    Operation(
        "post",
        "/detokenize",
        "Turn token ids into text",
        "model",
        (schema.DetokenizeBody,),
        answers.DetokenizedObject,
    ),
    Operation("get", "/server_info", "Show version, models and limits", "operator",
              answer=answers.ServerInfo),
    Operation("post", "/flush_cache", "Drop the workers' unused prefixes", "operator",
              answer=answers.Flushed),
    Operation("get", "/fleet", "Show every instance, and this gateway's figures", "operator",
              answer=shapes.FleetSnapshot),
    Operation("get", "/fleet/history", "Show this gateway's last three minutes", "operator",
              answer=shapes.FleetHistory),
    Operation(
        "get",
        "/fleet/events",
        "Follow the fleet and its engines' steps",
        "operator",
        answer=shapes.FleetSnapshot,
        event=shapes.WorkerSteps,
        description="A stream that does not end: `fleet` events with a snapshot, about one a"
        " second, and `steps` events with what workers have computed since.",
    ),
    Operation(
        "get",
        "/fleet/requests",
        "List the last requests of this gateway",
        "model",
        answer=shapes.RequestList,
        description="Newest first; `limit` is how many (1 to 500, by default 100), and"
        " `request_id` keeps those of that name alone.",
    ),
    Operation("get", "/fleet/requests/{id}", "Show one request's journey", "model",
              answer=shapes.RequestJourney),
    Operation("get", "/livez", "Whether the process lives", "probe"),
    Operation("get", "/readyz", "Whether requests can be served", "probe"),
    Operation("get", "/health", "The same as /readyz", "probe"),
    Operation("get", "/metrics", "Metrics, in Prometheus' text format", "operator"),
    Operation("get", "/openapi.json", "This document", "operator", answer=dict),
    Operation("get", "/docs", "This document as a page", "operator"),
)  # fmt: skip
