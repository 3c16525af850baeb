"""Converts messages or prompts to token ids; chats and long texts in a thread."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from appliance.dialects.turns import prepare
from appliance.errors import RequestError
from appliance.media.pictures import MAX_BYTES
from appliance.pictures import (
    attached_in,
    image_parts,
    laid_out,
    placed,
    read_picture,
    texts_beside,
    told,
)
from appliance.server.http.errors import BodyTooLargeError
from appliance.server.models.state import PICTURE_BYTES
from appliance.server.models.text_threads import SHORT
from appliance.server.requests.conversation import thought_budget
from appliance.server.requests.pieces import Reading
from appliance.server.requests.terms import salt_of
from appliance.tokenizer import DecodeStream
from appliance.tokenizer.fim import FORMS, end_ids, find_form

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from appliance.dialects.turns import Turn
    from appliance.engine.nouns.messages import EngineInfo
    from appliance.engine.nouns.picture import PromptPictures
    from appliance.engine.nouns.sampling_params import ThoughtBudget
    from appliance.media.pictures import Picture
    from appliance.pictures import Attached
    from appliance.server.http.image_urls import ImageUrls
    from appliance.server.models.model_state import ModelState
    from appliance.server.requests.conversation import Conversation
    from appliance.server.requests.tools import Tools
    from appliance.tokenizer import Tokenizer

MAX_PROMPTS = 64  # per request to /v1/completions
_OFF_LOOP_CHARACTERS = 4096
_TAIL = 16  # tokens at a prompt's end that may begin a thought
_LINE = 57  # bytes of a line in base64, whose end takes two characters in JSON
_MARKS = 64  # tokens of marks before a turn's text, at most


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A chat's prompt, and the reader of its answer."""

    ids: list[int]
    reading: Reading | None
    thinking: bool  # the answer begins inside a thought
    budget: ThoughtBudget | None
    continues: bool  # the answer continues the last turn
    pictures: PromptPictures | None = None


async def chat_prompt(state: ModelState, chat: Conversation, owner: str) -> ChatPrompt:
    """Render a conversation with the model's chat template.

    Args:
        owner: name of the request's API key, whose chats may share tokenized texts.

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

    salt = salt_of(state, chat.sampling, owner)

    def attach() -> tuple[list[Turn], list[Attached]]:
        turns = chat.turns()
        if not chat.is_limited:
            check_texts(turns, chat.size, state.config.max_body_bytes)
        return turns, attached_in(turns, state.pictures)

    def encode(attached: list[Turn], found: list[Picture]) -> ChatPrompt:
        dialect, given = tokenizer.dialect, told(attached)
        continued = _continued(given, chat)
        turns, definitions = prepare(dialect, given, chat.tools.definitions)
        write = partial(
            tokenizer.encode_chat,
            tools=definitions,
            add_generation_prompt=chat.begins_answer,
            options=chat.options,
            salt=salt,
            beside=texts_beside(found, state.pictures),
        )
        ids = write(turns, continues=continued)
        begun = None
        if continued is None:
            thinking = dialect.begins_thinking(_text(tokenizer, ids[-_TAIL:]))
        else:
            thinking, begun = _begun(tokenizer, turns, continued, write)
        reading = _reading(tokenizer, chat.tools, thinking=thinking, begun=begun)
        if begun is not None:
            thinking = reading is not None and reading.make().thinking
        budget = thought_budget(chat.thought_tokens, tokenizer, thinking=thinking)
        ids, pictures = laid_out(ids, found, state.pictures, tokenizer)
        return ChatPrompt(ids, reading, thinking, budget, continued is not None, pictures)

    # Even a chat of short texts can have large tools or options.
    run = partial(state.texts.run, owner=owner, size=chat.size)
    if state.pictures is None:
        return await run(lambda: encode(attach()[0], []))
    turns, attached = await run(attach)
    if state.server.image_urls is not None:
        attached = await _fetched(attached, state.server.image_urls)
    found = [await _read(one, state, owner) for one in attached]
    return await run(lambda: encode(turns, found))


async def _read(one: Attached, state: ModelState, owner: str) -> Picture:
    """Decode a picture in a turn of its own, so that it may be cancelled and others come between.

    One that is kept waits for no long work.
    """
    assert state.pictures is not None
    kept = partial(state.pictures.kept, one.data, one.detail)
    if (picture := await state.texts.run(kept, owner=owner, size=0)) is not None:
        return picture
    read = partial(read_picture, one, state.pictures)
    return await state.texts.run(read, owner=owner, size=SHORT + len(one.data))


async def _fetched(attached: Sequence[Attached], urls: ImageUrls) -> list[Attached]:
    """Return pictures, those in the place of addresses that are there."""
    left = PICTURE_BYTES
    found = []
    for one in attached:
        if one.url:
            with placed(one):
                data = await urls.fetch(one.url, min(MAX_BYTES, left))
            left -= len(data)
            found.append(replace(one, data=data, url=""))
        else:
            found.append(one)
    return found


def check_texts(turns: Sequence[Turn], size: int, most: int) -> None:
    """Refuse a body that is larger than others may be by more than its pictures.

    Args:
        size: bytes of the body.
        most: of one without pictures.

    Raises:
        RequestError: the rest of it is too large.
    """
    if size <= most:
        return
    pictures = sum(len(part["image"].data) for part in image_parts(turns))
    rest = size - pictures * 4 // 3 - 2 * pictures // _LINE
    if rest > most:
        raise BodyTooLargeError(f"the body must have at most {most} bytes beside its pictures")


def _continued(turns: list[Turn], chat: Conversation) -> str | None:
    """Return the field of the last turn that the answer continues, if it does.

    Removes an empty turn at the end, which some clients leave for the answer.
    """
    last = turns[-1] if turns else {"role": ""}
    if last["role"] != "assistant" or "tool_calls" in last or chat.continues is False:
        if chat.continues:
            raise RequestError(
                "only a last turn of the assistant, without tool calls, can be continued",
                param="continue_final_message",
            )
        return None
    if last["content"]:
        return "content"
    if last.get("reasoning_content"):
        return "reasoning_content"
    if chat.continues:
        return "content"
    if len(turns) > 1:
        turns.pop()
    return None


def _begun(
    tokenizer: Tokenizer, turns: list[Turn], field: str, write: Callable[..., list[int]]
) -> tuple[bool, str]:
    """Return True if an answer would begin inside a thought, and the marks before a turn's text.

    The marks are those that the template writes beyond the opening of an answer, such as those of
    a thought.
    """
    *before, last = turns
    opening = write(before) if before else []
    without = write([*before, {**last, field: ""}], continues=field)
    pairs = zip(opening, without, strict=False)
    common = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(opening), len(without)))
    thinking = tokenizer.dialect.begins_thinking(_text(tokenizer, without[:common][-_TAIL:]))
    marks = tokenizer.dialect.thought_marks
    begun = _text(tokenizer, without[common:][-_MARKS:])
    if field == "content" and marks is not None:
        _, opened, rest = str(last["content"]).rpartition(marks.opening)
        if opened and marks.closing not in rest:  # the text itself begins a thought
            begun += opened
    return thinking, begun


def _text(tokenizer: Tokenizer, ids: list[int]) -> str:
    return "".join(map(tokenizer.token_text, ids))


def _reading(
    tokenizer: Tokenizer, tools: Tools, *, thinking: bool, begun: str | None = None
) -> Reading | None:
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
        begun=begun,
    )
    return Reading(make, tokenizer.control_ids(dialect.marks))


async def completion_prompts(
    state: ModelState,
    prompt: str | list[str | int | list[int]],
    owner: str,
    *,
    param: str = "prompt",
    most: int = MAX_PROMPTS,
) -> list[list[int]]:
    """Return each prompt's token ids; accepts a text, texts, token ids or lists of these.

    Args:
        owner: name of the request's API key.
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
    encoded = encode() if at_once else await state.texts.run(encode, owner=owner, size=characters)
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


async def fim_prompts(
    state: ModelState, prompt: object, suffix: str, owner: str
) -> tuple[list[list[int]], list[int]]:
    """Return each prompt's token ids with its suffix, and the ids that end the answers.

    Control tokens in either text stay text: source files mention them.

    Raises:
        RequestError: the model cannot fill in the middle, or a prompt is not text.
    """
    info, tokenizer = state.serving()
    form = find_form(tokenizer)
    if form is None:
        raise RequestError(
            "this model was not trained to fill in the middle: its vocabulary has none of the "
            f"tokens for that which are known here ({', '.join(form.name for form in FORMS)}); "
            "leave suffix out",
            param="suffix",
            code="suffix_unsupported",
        )
    texts: Sequence[object] = prompt if isinstance(prompt, list) else [prompt]
    if not all(isinstance(text, str) for text in texts):
        raise RequestError("suffix goes with prompts that are texts", param="prompt")
    if len(texts) > MAX_PROMPTS:
        raise RequestError(
            f"the request has {len(texts)} prompts; at most {MAX_PROMPTS} are accepted",
            param="prompt",
        )
    template = form.template

    def encode() -> list[list[int]]:
        return [
            tokenizer.encode_filled(
                template, {"prefix": str(text), "suffix": suffix}, add_special_tokens=True
            )
            for text in texts
        ]

    ends = [end for end in end_ids(form, tokenizer) if end < info.vocab_size]
    size = sum(len(suffix) + len(str(text)) for text in texts)
    return await state.texts.run(encode, owner=owner, size=size), ends
