"""Converts messages or prompts to token ids; chats and long texts in a thread."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from appliance.dialects.turns import prepare
from appliance.errors import RequestError
from appliance.server.pieces import Reading
from appliance.server.thinking import thought_budget
from appliance.tokenizer import DecodeStream

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.engine.messages import EngineInfo
    from appliance.engine.thought_budget import ThoughtBudget
    from appliance.server.conversation import Conversation
    from appliance.server.model_state import ModelState
    from appliance.server.tools import Tools
    from appliance.tokenizer import Tokenizer

MAX_PROMPTS = 64  # per request to /v1/completions
_OFF_LOOP_CHARACTERS = 4096
_TAIL = 16  # tokens at a prompt's end that may begin a thought

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A chat's prompt, and the reader of its answer."""

    ids: list[int]
    reading: Reading | None
    thinking: bool  # the answer begins inside a thought
    budget: ThoughtBudget | None


async def chat_prompt(state: ModelState, chat: Conversation, salt: str) -> ChatPrompt:
    """Render a conversation with the model's chat template.

    Args:
        salt: only chats with the same salt share tokenized texts; see `terms.salt_of`.

    Raises:
        RequestError: a message is unsupported.
        ChatTemplateError: there is no template, or it fails on these messages.
    """
    _, tokenizer = state.serving()
    if tokenizer.chat_template is None:
        raise RequestError(
            "this model has no chat template; send a prompt to /v1/completions instead",
            param=chat.param,
            code="no_chat_template",
        )

    def encode() -> ChatPrompt:
        dialect = tokenizer.dialect
        turns, definitions = prepare(dialect, chat.turns(), chat.tools.definitions)
        ids = tokenizer.encode_chat(
            turns,
            tools=definitions,
            add_generation_prompt=chat.begins_answer,
            options=chat.options,
            salt=salt,
        )
        end = "".join(map(tokenizer.token_text, ids[-_TAIL:]))
        thinking = dialect.begins_thinking(end)
        reading = _reading(tokenizer, chat.tools, thinking=thinking)
        budget = thought_budget(chat.thought_tokens, tokenizer, thinking=thinking)
        return ChatPrompt(ids, reading, thinking, budget)

    # Even a chat of short texts can have large tools or options.
    return await off_loop(state, encode)


def _reading(tokenizer: Tokenizer, tools: Tools, *, thinking: bool) -> Reading | None:
    """Return the reader of an answer; None if all of it is content."""
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
    state: ModelState,
    prompt: str | list[str | int | list[int]],
    *,
    param: str = "prompt",
    most: int = MAX_PROMPTS,
) -> list[list[int]]:
    """Return each prompt's token ids; accepts a text, texts, token ids or lists of these.

    Args:
        param: its name.
        most: limit on prompts.

    Raises:
        RequestError: an empty or mixed list, an unknown token id, or too many prompts.
    """
    info, tokenizer = state.serving()
    prompts = _separate(prompt, param)
    if len(prompts) > most:
        raise RequestError(
            f"the request has {len(prompts)} prompts; at most {most} are accepted", param=param
        )
    characters = sum(len(one) for one in prompts if isinstance(one, str))

    def encode() -> list[list[int]]:
        return [
            tokenizer.encode(one, add_special_tokens=True) if isinstance(one, str) else one
            for one in prompts
        ]

    at_once = characters < _OFF_LOOP_CHARACTERS and not (characters and tokenizer.is_isolated)
    encoded = encode() if at_once else await off_loop(state, encode)
    for ids in encoded:
        _check_ids(ids, info, param)
        if not ids:
            raise RequestError(f"each {param} must have at least one token", param=param)
    return encoded


def prompt_text(prompt: str | list[str | int | list[int]], tokenizer: Tokenizer) -> list[str]:
    """Return each prompt's text, decoded from token ids if need be."""
    texts = []
    for one in _separate(prompt, "prompt"):
        if isinstance(one, str):
            texts.append(one)
        else:
            stream = DecodeStream(tokenizer)
            texts.append(stream.push(one) + stream.flush())
    return texts


def _separate(prompt: str | list[str | int | list[int]], param: str) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [[item for item in prompt if isinstance(item, int)]]
    if len(kinds) == 1:
        return [item for item in prompt if not isinstance(item, int)]
    raise RequestError(
        f"{param} must be a text, texts, token ids or lists of token ids, not a mixture",
        param=param,
    )


def _check_ids(ids: list[int], info: EngineInfo, param: str) -> None:
    largest = max(ids, default=0)
    if largest >= info.vocab_size:
        raise RequestError(
            f"{param} has the token id {largest}; this model has {info.vocab_size} tokens",
            param=param,
        )


async def off_loop(state: ModelState, work: Callable[[], ResultT]) -> ResultT:
    """Run work on long texts in a thread."""
    return await asyncio.get_running_loop().run_in_executor(state.text_pool, work)
