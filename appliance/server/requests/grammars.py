"""Reads the format that a body requests, and checks it before the engine gets it."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from appliance.errors import RequestError
from appliance.grammar import Grammar, GrammarKind
from appliance.grammar.token_names import check_token_names
from appliance.text.vocabulary import vocabulary_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.engine.nouns.messages import Vocabulary
    from appliance.server.models.model_state import ModelState
    from appliance.server.requests.schema import ResponseFormat, SamplingFields

_FORMATS = ("text", "json_object", "json_schema")


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
