"""Which fields of a body count, which do not, and which are refused.

*Supported* fields are those of the struct that the body is decoded into, less the refused
ones. *Ignored* fields have no effect on the result, and neither has any that no API knows.
*Refused* fields would change the result and are not built: any value but null and the
harmless ones listed here is an error naming the field. docs/rest.md shows the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from msgspec import Struct

from services.gateway.openai.responses.schema import ResponsesBody
from services.gateway.openai.schema import (
    ChatBody,
    CompletionBody,
    SGLangBody,
    SGLangSampling,
    TokenizeChatBody,
)

Harmless = Mapping[str, tuple[Any, ...]]  # refused field -> values that change nothing

_REFUSED: Harmless = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none",),  # tool_choice took its place
    "functions": ([],),  # tools took their place
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "lora_path": (),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_embeds": (),
    "stop_regex": (),
    "structural_tag": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_IGNORED = frozenset(
    {
        "include_reasoning",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "spaces_between_special_tokens",
        "store",
        "user",
    }
)
REFUSED_IN_STRUCTURED_OUTPUTS: Harmless = {
    "disable_additional_properties": (False,),
    "disable_any_whitespace": (False,),
    "structural_tag": (),
    "whitespace_pattern": (),
}


@dataclass(frozen=True, slots=True)
class FieldTable:
    """The fields of one kind of body; `within` is what a field's name begins with."""

    body: type[Struct]
    ignored: frozenset[str]
    refused: Harmless
    refused_values: Callable[[Any], tuple[Any, ...]] = field(init=False)  # of a body, in one call

    def __post_init__(self) -> None:
        object.__setattr__(self, "refused_values", attrgetter(*self.refused))

    @property
    def supported(self) -> frozenset[str]:
        return frozenset(self.body.__struct_fields__) - self.refused.keys()


def _table(body: type[Struct], ignored: frozenset[str], refused: Harmless) -> FieldTable:
    known = {name: refused[name] for name in body.__struct_fields__ if name in refused}
    return FieldTable(body, ignored, known)


_CHAT_ONLY: Harmless = {
    "add_special_tokens": (False,),  # the template alone decides about BOS
    "echo": (False,),
    "prompt_logprobs": (),
}
CHAT = _table(ChatBody, _IGNORED, {**_REFUSED, **_CHAT_ONLY})
TOKENIZE_CHAT = _table(TokenizeChatBody, _IGNORED, {**_REFUSED, **_CHAT_ONLY})
COMPLETIONS = _table(CompletionBody, _IGNORED, _REFUSED)
SGLANG = FieldTable(
    SGLangBody,
    ignored=frozenset({"conversation_id", "custom_labels", "log_metrics", "no_logs", "session_id"}),
    refused={
        "audio_data": ([],),
        "custom_logit_processor": (),
        "extra_key": (),
        "image_data": ([],),
        "input_embeds": (),
        "logprob_start_len": (-1,),
        "lora_path": (),
        "max_thinking_tokens": (),
        "return_hidden_states": (False,),
        "return_text_in_logprobs": (False,),
        "session_params": ({},),
        "token_ids_logprob": ([],),
        "video_data": ([],),
    },
)
SGLANG_SAMPLING = FieldTable(
    SGLangSampling,
    ignored=frozenset({"spaces_between_special_tokens", "stream_interval"}),
    refused={
        "custom_params": ({},),
        "n": (1,),
        "stop_regex": ([],),
        "structural_tag": (),
    },
)
RESPONSES = FieldTable(
    ResponsesBody,
    ignored=frozenset(
        {
            "access_programs",
            "background_options",
            "max_tool_calls",  # built-in tools only, of which there are none
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "store",  # nothing is kept, and the answer says so
            "stream_options",  # obfuscation, which there is none of
            "user",
        }
    ),
    refused={
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "max_tokens": (),
        "moderation": (),
        "n": (1,),
        "previous_response_id": (),
        "prompt": (),
        "truncation": ("disabled",),
    },
)
