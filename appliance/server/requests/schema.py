"""Requests as strict structs, the source of the JSON schema in /openapi.json.

Fields that no struct has are in `unsupported`, or have no effect.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from appliance.engine.nouns.request import MAX_PRIORITY, MAX_TIMEOUT
from appliance.engine.nouns.sampling_params import (
    MAX_BEST_OF,
    MAX_LENGTH_PENALTY,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
)

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_SALT = 1024  # characters
MAX_TOKENS = 2**31 - 1

Count = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
# -1 is as many as fit, as in llama.cpp and LM Studio; 0 is checked elsewhere.
Most = Annotated[int, Meta(ge=-1, le=MAX_TOKENS)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
# Tokens that penalties count, as in llama.cpp: -1 for all, 0 for none.
LastTokens = Annotated[int, Meta(ge=-1, le=MAX_TOKENS)]
LEAST_MULTIPLIER = 0.01
Multiplier = Annotated[float, Meta(ge=LEAST_MULTIPLIER, le=100.0)]
StopString = Annotated[str, Meta(max_length=MAX_STOP_LENGTH)]  # an empty one is ignored
# Checked elsewhere, for a message with both bounds.
Priority = Annotated[
    int, Meta(extra_json_schema={"minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY})
]
Timeout = Annotated[
    float, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": MAX_TIMEOUT})
]  # seconds
# Checked elsewhere, for a message with the known values.
Role = Annotated[str, Meta(extra_json_schema={"enum": list(ROLES)})]
TextType = Annotated[str, Meta(extra_json_schema={"enum": ["text", "refusal"]})]
FunctionType = Annotated[str, Meta(extra_json_schema={"const": "function"})]
ToolType = Annotated[str, Meta(extra_json_schema={"enum": ["function", "custom"]})]
FormatType = Annotated[
    str, Meta(extra_json_schema={"enum": ["text", "json_object", "json_schema"]})
]
ToolName = Annotated[str, Meta(extra_json_schema={"pattern": "^[a-zA-Z0-9_-]{1,64}$"})]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Prompt = str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]


class StreamOptions(msgspec.Struct, kw_only=True):
    """Extras of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: counts in every chunk


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """A schema that the answer obeys, strict or not."""

    schema: dict[str, Any] | bool | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """Format of the answer: text, json_object or json_schema."""

    type: FormatType
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | bool | None = None  # where llama.cpp's server has it, for both types


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A constraint on the answer, as in vLLM; set one field."""

    json: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # Lark or GBNF
    json_object: bool | None = None


class TermsFields(msgspec.Struct, kw_only=True):
    """Fields of every engine request; null equals absent."""

    model: str | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT)] | None = None
    priority: Priority | None = None
    timeout: Timeout | None = None
    user: str | None = None


class SamplingFields(TermsFields, kw_only=True):
    """Fields that chat and text completions share."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_BEST_OF)] | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Meta(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)] | None = (
        None
    )
    early_stopping: bool | Literal["never"] | None = None
    max_tokens: Most | None = None
    n_predict: Annotated[int, Meta(ge=-2, le=MAX_TOKENS)] | None = None  # llama.cpp's name of it
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None  # 0 and -1 keep all
    min_p: Share | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Multiplier | None = None
    repeat_penalty: Multiplier | None = None  # llama.cpp's name of it
    repeat_last_n: LastTokens | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Meta(ge=-100.0, le=100.0)]],
            Meta(max_length=MAX_LOGIT_BIAS),
        ]
        | None
    ) = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None  # this and the next: older names of vLLM
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | bool | str | None = None  # and `grammar`: llama.cpp's names
    grammar: str | None = None


class ImageUrl(msgspec.Struct, kw_only=True):
    """A picture as a data URL."""

    url: str | None = None
    detail: str | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a message: text, an assistant's refusal, or a picture."""

    type: TextType
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | str | None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    """The called tool; its arguments are JSON text or the object itself."""

    name: str
    arguments: Any = None


class CalledCustomTool(msgspec.Struct, kw_only=True):
    """The called custom tool and its input."""

    name: str
    input: str = ""


class ToolCall(msgspec.Struct, kw_only=True):
    """A call of an earlier turn, of a function or of a custom tool."""

    function: CalledFunction | None = None
    custom: CalledCustomTool | None = None
    id: str | None = None
    type: ToolType | None = None


class Message(msgspec.Struct, kw_only=True):
    """One turn of a conversation."""

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None  # before there were `tool_calls`
    reasoning_content: str | None = None
    reasoning: str | None = None  # its newer name


class Function(msgspec.Struct, kw_only=True):
    """Name, purpose and parameters of a tool."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolGrammar(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A grammar in Lark's notation or a regex."""

    syntax: str | None = None
    definition: str | None = None


class CustomToolFormat(msgspec.Struct, kw_only=True):
    """Format of a custom tool's input: text, or a grammar."""

    type: str
    grammar: ToolGrammar | None = None


class CustomTool(msgspec.Struct, kw_only=True):
    """Name, purpose and input of a custom tool."""

    name: ToolName
    description: str | None = None
    format: CustomToolFormat | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool that the model may call."""

    type: ToolType
    function: Function | None = None
    custom: CustomTool | None = None


class FunctionName(msgspec.Struct, kw_only=True):
    """Name of a tool."""

    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    """A tool by its name."""

    type: FunctionType
    function: FunctionName


class AllowedTool(msgspec.Struct, kw_only=True):
    """A function or a custom tool by its name."""

    type: ToolType
    function: FunctionName | None = None
    custom: FunctionName | None = None


class AllowedTools(msgspec.Struct, kw_only=True):
    """The tools that the model may call, or must call one of."""

    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class ChosenTools(msgspec.Struct, kw_only=True):
    """The tool that the model must call, or those that it may call."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["function", "custom", "allowed_tools"]})]
    function: FunctionName | None = None
    custom: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """Effort, budget and switch of thinking, as OpenRouter's clients write them."""

    effort: Effort | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    enabled: bool | None = None


class ThinkingSwitch(msgspec.Struct, kw_only=True):
    """Switch and budget of thinking, as DeepSeek's and Anthropic's clients write them."""

    type: Literal["enabled", "adaptive", "auto", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None


class ChatRequest(SamplingFields, kw_only=True):
    """Body of POST /v1/chat/completions."""

    # Limited only by the body's size: agents send hundreds.
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Most | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTools | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Function] | None = None  # this and the next: OpenAI's names of 2023
    function_call: Literal["none", "auto"] | FunctionName | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    # Names of the same in other APIs of chats.
    reasoning: ReasoningOptions | None = None
    thinking: ThinkingSwitch | None = None
    think: bool | Effort | None = None
    enable_thinking: bool | None = None
    thinking_budget: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class CompletionRequest(SamplingFields, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: Prompt
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None  # text after the answer
