"""Tokenizes and detokenizes texts and chats, in vLLM's shapes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from appliance.errors import RequestError
from appliance.server.openai.turns import ending_of, tools_of, turns_of
from appliance.server.requests.conversation import Conversation, template_options
from appliance.server.requests.prompt import chat_prompt
from appliance.server.requests.schema import ChatRequest
from appliance.server.retrieval.answers import Detokenized, Tokenized, TokenizerInfo

if TYPE_CHECKING:
    from appliance.server.models.model_state import ModelState
    from appliance.server.retrieval.schema import DetokenizeRequest, TokenizeRequest


async def tokenized(state: ModelState, body: TokenizeRequest, owner: str, size: int) -> Tokenized:
    """Tokenize a prompt or a chat of `size` bytes.

    Raises:
        RequestError: the body has neither, or both.
        ChatTemplateError: the template fails on this chat.
    """
    info, tokenizer = state.serving()
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("send a prompt or messages, one of them", param="prompt")
    if body.prompt is not None:
        add = body.add_special_tokens is not False
        encode = partial(tokenizer.encode, body.prompt, add_special_tokens=add)
        ids = await state.texts.run(encode, owner=owner, size=len(body.prompt))
    else:
        if body.add_special_tokens:
            raise RequestError(
                "a chat has the special tokens of its template and no others; leave "
                "add_special_tokens out",
                param="add_special_tokens",
            )
        ids = await _chat_ids(state, body, owner, size)
    strings = None
    if body.return_token_strs:
        strings = await state.texts.run(
            lambda: list(map(tokenizer.token_text, ids)), owner=owner, size=len(ids)
        )
    return Tokenized(
        count=len(ids), max_model_len=info.context_length, tokens=ids, token_strs=strings
    )


async def _chat_ids(state: ModelState, body: TokenizeRequest, owner: str, size: int) -> list[int]:
    chat = ChatRequest(messages=body.messages or [], tools=body.tools)
    begins_answer, continues = ending_of(body.add_generation_prompt, body.continue_final_message)
    conversation = Conversation(
        sampling=chat,
        turns=partial(turns_of, chat.messages),
        tools=tools_of(chat),
        options=template_options(None, body.chat_template_kwargs),
        begins_answer=begins_answer,
        continues=continues,
        size=size,
    )
    return (await chat_prompt(state, conversation, owner)).ids


def tokenizer_info(state: ModelState) -> TokenizerInfo:
    info, tokenizer = state.serving()
    bos, eos = tokenizer.bos_token_id, next(iter(tokenizer.eos_token_ids), None)
    template = tokenizer.chat_template
    return TokenizerInfo(
        vocab_size=info.vocab_size,
        model_max_length=info.context_length,
        add_bos_token=tokenizer.add_bos,
        bos_token=None if bos is None else tokenizer.token_text(bos),
        eos_token=None if eos is None else tokenizer.token_text(eos),
        chat_template=None if template is None else template.source,
    )


async def detokenized(state: ModelState, body: DetokenizeRequest, owner: str) -> Detokenized:
    """Decode token ids.

    Raises:
        RequestError: the model lacks a token.
    """
    info, tokenizer = state.serving()
    largest = max(body.tokens, default=0)
    if largest >= info.vocab_size:
        raise RequestError(
            f"tokens has the token id {largest}; this model has {info.vocab_size} tokens",
            param="tokens",
        )
    decode = partial(tokenizer.decode, body.tokens, with_control=True)
    return Detokenized(await state.texts.run(decode, owner=owner, size=len(body.tokens)))
