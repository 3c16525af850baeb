"""Builds a chat answer's grammar from its tools and format."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from appliance.dialects.constrain import may_call, must_call
from appliance.errors import RequestError
from appliance.grammar import Grammar, GrammarKind
from appliance.server.requests.grammars import checked_grammar, expect_grammars, grammar_of

if TYPE_CHECKING:
    from appliance.server.models.model_state import ModelState
    from appliance.server.requests.conversation import Conversation
    from appliance.server.requests.tools import Tools
    from appliance.tokenizer import Tokenizer

OF_THE_WHOLE = ("tool_choice", "structured_outputs")  # of no tool's schema
BLAME_SECONDS = 5.0  # to find which of a request's tools does not compile


async def chat_grammar(
    state: ModelState, chat: Conversation, owner: str, *, thinking: bool, continues: bool
) -> Grammar | None:
    """Return the grammar for the engine; None allows any answer.

    Args:
        thinking: the answer begins inside a thought.
        continues: it continues the last turn.

    Raises:
        RequestError: two settings exclude each other, or a schema does not compile.
    """
    tools = chat.tools
    form = chat.form or grammar_of(chat.sampling)
    content = None if form is None else await checked_grammar(state, form[1], form[0])
    if content is None and not (tools.required or tools.strict):
        if tools.definitions:
            expect_grammars(state)  # the next request may need one
        return None
    _, tokenizer = state.serving()
    build = partial(_build, tokenizer, tools, content, thinking=thinking, continues=continues)
    try:
        grammar = await state.texts.run(build, owner=owner, size=chat.size)
        if content is not None and grammar.text == content.text:
            return grammar
        return await checked_grammar(state, grammar, "tools")
    except RequestError as error:
        if error.param not in OF_THE_WHOLE:
            await _blame(state, tools)
        raise RequestError(error.message, param=error.param or "tools") from error


async def _blame(state: ModelState, tools: Tools) -> None:
    """Raise the RequestError of the tool that does not compile, if that is soon found."""
    loop = asyncio.get_running_loop()
    end = loop.time() + BLAME_SECONDS
    for place, schema in zip(tools.places, (tools.schemas or {}).values(), strict=True):
        if loop.time() < end:
            await state.grammars.check(Grammar.schema_as_given(schema), place)


def _build(
    tokenizer: Tokenizer,
    tools: Tools,
    content: Grammar | None,
    *,
    thinking: bool,
    continues: bool,
) -> Grammar:
    dialect = tokenizer.dialect
    control = tokenizer.mark_ids(dialect.marks)
    # An answer that must call has no text, so a format asks for nothing.
    if tools.required and tools.schemas is not None:
        wanted = {name: tools.schemas[name] for name in tools.required}
        return must_call(
            dialect,
            wanted,
            control,
            one_call=tools.one_call,
            thinking=thinking,
            continues=continues,
        )
    closing = dialect.thought_marks.closing if thinking and dialect.thought_marks else None
    after = None if closing is None else control.get(closing)
    if content is not None:
        has_marks = dialect.form.framed and (thinking or not continues)
        if tools.schemas is None and not has_marks and (not thinking or after):
            return msgspec.structs.replace(content, after=after)
        if content.kind is not GrammarKind.JSON_SCHEMA:
            raise RequestError(
                "beside tools, and with the marks of this model, an answer's format can be a JSON "
                "schema only",
                param="structured_outputs",
            )
    return may_call(
        dialect,
        tools.schemas or {},
        control,
        thinking=thinking,
        content=content,
        continues=continues,
    )
