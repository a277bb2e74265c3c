"""The bodies that clients send, as msgspec structs.

What a field means for the result is in `services.gateway.openai.fields`: those typed `Any`
are mostly refused ones. `null` is the same as absent everywhere.

`Integer` also takes 3.0, as JSON schema's integer does; 2.5 is refused on conversion.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

Integer = int | float


class Function(Struct):
    """The function of a tool call; `arguments` is JSON as text."""

    name: str
    arguments: str = ""


class ToolCall(Struct):
    """A call that an assistant message made."""

    function: Function
    id: str = ""


class ContentPart(Struct):
    """A part of a message; only `text` and `refusal` parts can be served."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Message(Struct):
    """One turn."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    audio: Any = None
    function_call: Any = None


class StreamOptions(Struct):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    @property
    def counts_on(self) -> bool:
        """Every event has the counts so far; only where the last has them all, as in vLLM."""
        return bool(self.include_usage and self.continuous_usage_stats)


JsonSchema = dict[str, Any] | bool | str  # as text too, which vLLM takes


class NamedSchema(Struct):
    """`response_format.json_schema`. It is always kept strictly, whatever `strict` says."""

    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct):
    """`response_format`: type text, json_object or json_schema."""

    type: str
    json_schema: NamedSchema | None = None


class StructuredOutputs(Struct):
    """vLLM's `structured_outputs`: one of these."""

    json: JsonSchema | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    disable_additional_properties: Any = None
    disable_any_whitespace: Any = None
    structural_tag: Any = None
    whitespace_pattern: Any = None


class SamplingBody(Struct, kw_only=True):
    """What every generating endpoint takes."""

    model: str | None = None
    stream: bool | None = None
    n: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    min_p: float | None = None
    seed: Integer | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    max_tokens: Integer | None = None
    min_tokens: Integer | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    timeout: float | None = None
    priority: Integer | None = None
    cache_salt: str | None = None


class GenerateBody(SamplingBody, kw_only=True):
    """POST /generate, as Mini-SGLang has it: with `prompt`."""

    prompt: str | list[int]


class SGLangSampling(Struct, kw_only=True):
    """SGLang's `sampling_params`. Without a `max_new_tokens` there are 128; null asks for all
    that the context has room for."""

    max_new_tokens: Integer | None = 128
    min_new_tokens: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    min_p: float | None = None
    sampling_seed: Integer | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    json_schema: JsonSchema | None = None
    regex: str | None = None
    ebnf: str | None = None

    custom_params: Any = None
    n: Any = None
    stop_regex: Any = None
    structural_tag: Any = None


class SGLangBody(Struct, kw_only=True):
    """POST /generate, as SGLang has it: with `text` or `input_ids`."""

    text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: SGLangSampling | None = None
    stream: bool | None = None
    rid: str | None = None
    return_logprob: bool | None = None
    top_logprobs_num: Integer | None = None
    model: str | None = None
    timeout: float | None = None
    priority: Integer | None = None
    cache_salt: str | None = None

    audio_data: Any = None
    custom_logit_processor: Any = None
    extra_key: Any = None
    image_data: Any = None
    input_embeds: Any = None
    logprob_start_len: Any = None
    lora_path: Any = None
    max_thinking_tokens: Any = None
    return_hidden_states: Any = None
    return_text_in_logprobs: Any = None
    session_params: Any = None
    token_ids_logprob: Any = None
    video_data: Any = None


class OpenAIBody(SamplingBody, kw_only=True):
    """What the two OpenAI endpoints share."""

    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    ebnf: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json: JsonSchema | None = None
    guided_regex: str | None = None
    regex: str | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: Integer | None = None
    truncate_prompt_tokens: Integer | None = None

    allowed_token_ids: Any = None
    bad_words: Any = None
    best_of: Any = None
    guided_whitespace_pattern: Any = None
    kv_transfer_params: Any = None
    logits_processors: Any = None
    lora_path: Any = None
    prompt_embeds: Any = None
    stop_regex: Any = None
    structural_tag: Any = None
    use_beam_search: Any = None


class ChatBody(OpenAIBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    reasoning_effort: str | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    audio: Any = None
    chat_template: Any = None
    documents: Any = None
    echo: Any = None
    function_call: Any = None
    functions: Any = None
    mm_processor_kwargs: Any = None
    modalities: Any = None
    moderation: Any = None
    prediction: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class CompletionBody(OpenAIBody, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: Integer | None = None

    suffix: Any = None


class TokenizeTextBody(Struct, kw_only=True):
    """POST /tokenize with a text."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatBody(Struct, kw_only=True):
    """POST /tokenize with a conversation."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    model: str | None = None
    return_token_strs: bool | None = None
    add_special_tokens: Any = None
    chat_template: Any = None


class DetokenizeBody(Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None
