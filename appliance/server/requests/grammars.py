"""The grammar of an answer, from its format and tools, checked before the engine gets it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from appliance.dialects.constrain import may_call, must_call
from appliance.errors import RequestError
from appliance.grammar import Grammar, GrammarKind
from appliance.text import vocabulary_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.engine.nouns.messages import Vocabulary
    from appliance.server.models.model_state import ModelState
    from appliance.server.requests.conversation import Conversation
    from appliance.server.requests.schema import ResponseFormat, SamplingFields
    from appliance.server.requests.tools import Tools
    from appliance.tokenizer import Tokenizer

_FORMATS = ("text", "json_object", "json_schema")
OF_THE_WHOLE = ("tool_choice", "structured_outputs")  # of no tool's schema
BLAME_SECONDS = 5.0  # to find which of a request's tools does not compile

# The first match wins, so names inside texts, expressions and comments do not count.
# What is not closed counts up to the line's end, so that no character is read twice, and nothing
# is given back (`++`), so that `re` remembers no place to go back to for each character.
_NAMES = re.compile(
    r""" "(?:\\.|[^"\\\n]++)*+"? | //[^\n]* | \#[^\n]* | /(?:\\.|[^/\\\n]++)++/?
    | (?P<name><[^<>\s]+>) """,
    re.VERBOSE,
)
_NUMBERS = re.compile(r"<\[(\^?[0-9,-]+)\]>")


async def prepare_grammar(state: ModelState, body: SamplingFields) -> Grammar | None:
    """Return the grammar for the engine to enforce, or None.

    Raises:
        RequestError: the body requests two formats, or an invalid one.
    """
    found = grammar_of(body)
    if found is None:
        return None
    param, grammar = found
    return await checked_grammar(state, grammar, param)


async def checked_grammar(state: ModelState, grammar: Grammar, param: str) -> Grammar:
    """Check a grammar and prepare the engine for it.

    Raises:
        RequestError: it does not compile, see `GrammarChecks.check`, or names an unknown token.
    """
    grammar = await state.grammars.check(grammar, param)
    vocabulary = await asyncio.shield(expect_grammars(state))
    if param.endswith("grammar"):  # built here, so its tokens exist
        _check_tokens(state, vocabulary, grammar, param)
    return grammar


def expect_grammars(state: ModelState) -> asyncio.Future[Vocabulary]:
    """Send the vocabulary to the engine, which prepares for grammars when idle.

    Takes a second, and memory, for a large vocabulary, so only requests with tools or a format
    cause it.
    """
    checks = state.grammars
    if checks.vocabulary is None:
        _, tokenizer = state.serving()
        # All keys wait for it, so that it counts as short.
        work = state.texts.run(partial(vocabulary_of, tokenizer), owner="", size=0)
        checks.vocabulary = asyncio.ensure_future(work)
        checks.vocabulary.add_done_callback(partial(_learn, state))
    return checks.vocabulary


def _learn(state: ModelState, found: asyncio.Future[Vocabulary]) -> None:
    if found.cancelled() or found.exception() is not None:
        state.grammars.vocabulary = None  # the next request tries again
    else:
        state.engine.learn(found.result())


def _check_tokens(state: ModelState, vocabulary: Vocabulary, grammar: Grammar, param: str) -> None:
    info, _ = state.serving()
    control = {vocabulary.tokens[i].decode(errors="replace") for i in vocabulary.special}
    try:
        check_token_names(grammar.text, control, info.vocab_size)
    except RequestError as error:
        raise RequestError(f"{param}: {error}", param=param) from error


def check_token_names(text: str, control: Collection[str], vocab_size: int) -> None:
    """Check that a model has the tokens that a Lark grammar names.

    Args:
        text: of a well-formed grammar.
        control: texts of the model's control tokens.
        vocab_size: number of ids.

    Raises:
        RequestError: it lacks one; the message has the place.
    """
    for found in _NAMES.finditer(text):
        name = found["name"]
        if name is None or name in control or name == "<[*]>":
            continue
        if numbers := _NUMBERS.fullmatch(name):
            if all(int(number) < vocab_size for number in re.findall(r"\d+", numbers[1])):
                continue
            problem = f"{name} is not among this model's token ids, 0 to {vocab_size - 1}"
        else:
            problem = f"this model has no control token {name}"
        line = text.count("\n", 0, found.start()) + 1
        column = found.start() - text.rfind("\n", 0, found.start())
        raise RequestError(f"line {line}, column {column}: {problem[:400]}")


def grammar_of(body: SamplingFields) -> tuple[str, Grammar] | None:
    """Return the name of the field that requests a grammar, and the grammar.

    Raises:
        RequestError: two fields request one, or it is too long.
    """
    given: list[tuple[str, Callable[[], Grammar]]] = []
    if (form := body.response_format) is not None and form.type != "text":
        given.append(_of_format(form))
    outputs = body.structured_outputs
    for prefix, source in (("structured_outputs.", outputs), ("guided_", body)):
        for name in ("json", "regex", "choice", "grammar"):
            field = name if source is outputs else f"guided_{name}"
            # Clients with a box for it, as SillyTavern, send an empty text if nothing is in there.
            if (value := getattr(source, field, None)) not in (None, ""):
                given.append((prefix + name, partial(_make, name, value)))
    if body.json_schema not in (None, ""):
        given.append(("json_schema", partial(_make, "json", body.json_schema)))
    if body.grammar:
        given.append(("grammar", partial(_make, "grammar", body.grammar)))
    if outputs is not None and outputs.json_object:
        given.append(("structured_outputs.json_object", Grammar.json_object))
    if len(given) > 1:
        names = " and ".join(name for name, _ in given[:2])
        raise RequestError(
            f"{names} both say what the answer looks like; leave one out", param=given[1][0]
        )
    for param, make in given:
        try:
            return param, make()
        except RequestError as error:
            raise RequestError(f"{param}: {error}", param=param) from error
    return None


def schema_form(param: str, schema: Any) -> tuple[str, Grammar]:
    """Return the schema field's name, and its grammar; raise RequestError for one too long."""
    try:
        return param, Grammar.schema_as_given(schema)
    except RequestError as error:
        raise RequestError(f"{param}: {error}", param=param) from error


def _of_format(form: ResponseFormat) -> tuple[str, Callable[[], Grammar]]:
    bare = form.schema if form.json_schema is None else None
    if bare is not None and form.type in ("json_object", "json_schema"):
        return "response_format.schema", lambda: Grammar.schema_as_given(bare)
    if form.type == "json_object":
        return "response_format", Grammar.json_object
    if form.type != "json_schema":
        raise RequestError(
            f"response_format.type: {form.type[:100]!r} is none of {', '.join(_FORMATS)}",
            param="response_format.type",
        )
    schema = None if form.json_schema is None else form.json_schema.schema
    if schema is None:
        missing = "response_format.json_schema" + ("" if form.json_schema is None else ".schema")
        raise RequestError(f"{missing} is missing", param=missing)
    return "response_format.json_schema.schema", lambda: Grammar.schema_as_given(schema)


def _make(name: str, value: Any) -> Grammar:
    match name:
        case "json":
            return Grammar.schema_as_given(value)
        case "regex":
            return Grammar.regex(value)
        case "choice":
            return Grammar.choice(value)
        case _:
            return Grammar(
                GrammarKind.LARK, value
            )  # otherwise GBNF, which the limited process parses


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
