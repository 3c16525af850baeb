"""From messages or prompts to token ids; chats and long texts in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from appliance.dialects.turns import prepare
from appliance.errors import RequestError
from appliance.server.answer import Reading
from appliance.server.thinking import template_options, thought_budget
from appliance.server.turns import turns_of
from appliance.tokenizer import DecodeStream

if TYPE_CHECKING:
    from appliance.engine.messages import EngineInfo
    from appliance.engine.request import ThoughtBudget
    from appliance.server.schema import ChatRequest
    from appliance.server.state import ServerState
    from appliance.server.tools import Tools
    from appliance.tokenizer import Tokenizer

MAX_PROMPTS = 64  # of one request to /v1/completions
_OFF_LOOP_CHARACTERS = 4096
_TAIL = 16  # tokens at the end of a prompt that may begin a thought

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A chat for the model, and how to read what it answers."""

    ids: list[int]
    reading: Reading | None
    thinking: bool  # the answer begins within a thought
    budget: ThoughtBudget | None


async def chat_prompt(state: ServerState, body: ChatRequest, tools: Tools, salt: str) -> ChatPrompt:
    """A conversation in the model's own chat format.

    Args:
        state: the server.
        body: the request.
        tools: that it offers.
        salt: only chats of the same salt find one another's texts tokenized; see `terms.salt_of`.

    Raises:
        RequestError: a message is of a kind that is not supported.
        ChatTemplateError: there is no template, or it does not render these messages.
    """
    _, tokenizer = state.serving()
    if tokenizer.chat_template is None:
        raise RequestError(
            "this model has no chat template; send a prompt to /v1/completions instead",
            param="messages",
            code="no_chat_template",
        )
    options = template_options(body)

    def encode() -> ChatPrompt:
        dialect = tokenizer.dialect
        turns, definitions = prepare(dialect, turns_of(body.messages), tools.definitions)
        ids = tokenizer.encode_chat(turns, tools=definitions, options=options, salt=salt)
        end = "".join(map(tokenizer.token_text, ids[-_TAIL:]))
        thinking = dialect.begins_thinking(end)
        reading = _reading(tokenizer, tools, thinking=thinking)
        return ChatPrompt(
            ids, reading, thinking, thought_budget(body, tokenizer, thinking=thinking)
        )

    # However short its texts are, a chat can have a great deal beside them.
    return await _off_loop(state, encode)


def _reading(tokenizer: Tokenizer, tools: Tools, *, thinking: bool) -> Reading | None:
    """How to read an answer, which may begin within a thought; None if all of it is content."""
    dialect = tokenizer.dialect
    if tools.schemas is None and not dialect.splits_any:
        return None
    make = partial(
        dialect.reader,
        tools.schemas,
        thinking=thinking,
        one_call=tools.one_call,
        must_call=bool(tools.required),
    )
    return Reading(make, tokenizer.control_ids(dialect.marks))


async def completion_prompts(
    state: ServerState, prompt: str | list[str | int | list[int]]
) -> list[list[int]]:
    """Token ids of each prompt: a text, texts, token ids or lists of these.

    Raises:
        RequestError: an empty or mixed list, an unknown token id, or too many prompts.
    """
    info, tokenizer = state.serving()
    prompts = _separate(prompt)
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(
            f"the request has {len(prompts)} prompts; at most {MAX_PROMPTS} are accepted",
            param="prompt",
        )
    encoded = []
    for one in prompts:
        if isinstance(one, str):
            encode = partial(tokenizer.encode, one, add_special_tokens=True)
            at_once = len(one) < _OFF_LOOP_CHARACTERS and not tokenizer.is_isolated
            ids = encode() if at_once else await _off_loop(state, encode)
        else:
            ids = one
            _check_ids(ids, info)
        if not ids:
            raise RequestError("a prompt must have at least one token", param="prompt")
        encoded.append(ids)
    return encoded


def prompt_text(prompt: str | list[str | int | list[int]], tokenizer: Tokenizer) -> list[str]:
    """The text of each prompt; token ids are detokenized."""
    texts = []
    for one in _separate(prompt):
        if isinstance(one, str):
            texts.append(one)
        else:
            stream = DecodeStream(tokenizer)
            texts.append(stream.push(one) + stream.flush())
    return texts


def _separate(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [[item for item in prompt if isinstance(item, int)]]
    if len(kinds) == 1:
        return [item for item in prompt if not isinstance(item, int)]
    raise RequestError(
        "prompt must be a text, texts, token ids or lists of token ids, not a mixture",
        param="prompt",
    )


def _check_ids(ids: list[int], info: EngineInfo) -> None:
    largest = max(ids, default=0)
    if largest >= info.vocab_size:
        raise RequestError(
            f"prompt has the token id {largest}; this model has {info.vocab_size} tokens",
            param="prompt",
        )


async def _off_loop(state: ServerState, work: Callable[[], ResultT]) -> ResultT:
    return await asyncio.get_running_loop().run_in_executor(state.text_pool, work)
