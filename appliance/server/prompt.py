"""From messages or prompts to token ids; chats and long texts in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from appliance.errors import RequestError
from appliance.tokenizer import DecodeStream

if TYPE_CHECKING:
    from appliance.engine.messages import EngineInfo
    from appliance.server.schema import ContentPart, Message
    from appliance.server.state import ServerState
    from appliance.tokenizer import Tokenizer

MAX_PROMPTS = 64  # of one request to /v1/completions
_OFF_LOOP_CHARACTERS = 4096
_ROLES = {"system", "developer", "user", "assistant", "tool"}

ResultT = TypeVar("ResultT")


async def chat_prompt(state: ServerState, messages: list[Message], salt: str) -> list[int]:
    """Token ids of a conversation in the model's own chat format.

    Args:
        state: the server.
        messages: the conversation.
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

    def encode() -> list[int]:
        turns = [_turn(message, f"messages[{number}]") for number, message in enumerate(messages)]
        return tokenizer.encode_chat(turns, salt=salt)

    # However short its texts are, a chat can have a great deal beside them.
    return await _off_loop(state, encode)


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


def _turn(message: Message, where: str) -> dict[str, Any]:
    """One message as templates expect it."""
    if message.role not in _ROLES:
        raise RequestError(
            f"{where}.role is {message.role[:40]!r}; known roles: {', '.join(sorted(_ROLES))}",
            param="messages",
        )
    if message.role == "tool" and not message.tool_call_id:
        raise RequestError(f"{where} is of role tool and needs a tool_call_id", param="messages")
    turn: dict[str, Any] = {
        # Templates know system; developer is OpenAI's newer name for it.
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(message.content, where),
    }
    for name in ("name", "tool_calls", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            turn[name] = value
    return turn


def _text(content: str | list[ContentPart] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        if part.type != "text" or part.text is None:
            raise RequestError(
                f"{where} has a content part of type {part.type[:40]!r}; only text is supported",
                param="messages",
                code="unsupported_content",
            )
        texts.append(part.text)
    return "\n".join(texts)


async def _off_loop(state: ServerState, work: Callable[[], ResultT]) -> ResultT:
    return await asyncio.get_running_loop().run_in_executor(state.text_pool, work)
