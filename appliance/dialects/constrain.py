"""Builds grammars for answers that must call a tool, or whose calls must obey a schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from appliance.dialects.lark import ANY_TEXT, Lark
from appliance.errors import RequestError
from appliance.grammar import Grammar
from appliance.grammar.grammar import with_options

if TYPE_CHECKING:
    from appliance.dialects.dialect import Dialect
    from appliance.dialects.formats.form import Schemas

MAX_CALLS = 8  # per answer that must call: small models do not stop by themselves
_SPACE = r"/[ \n]{0,4}/"
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties", "additionalProperties")


def must_call(
    dialect: Dialect,
    schemas: Schemas,
    control: Mapping[str, int],
    *,
    one_call: bool,
    thinking: bool,
    continues: bool = False,
) -> Grammar:
    """Build the grammar of answers that are one or more calls, optionally after a thought.

    Args:
        schemas: JSON Schema of the arguments of each tool that may be called, by name.
        control: ids of the control tokens among the dialect's marks.
        thinking: the answer begins inside a thought.
        continues: it continues a turn that has begun.
    """
    lark, form = Lark(control), dialect.form
    call = f"{lark.mark(form.opening)} {_calls(dialect, schemas, lark)}"
    start = f"{_before(dialect, lark, thinking=thinking)} {call}"
    if not one_call and form.between is not None:
        start += f" ({lark.mark(form.between)} {call}){{0,{MAX_CALLS - 1}}}"
    if continues and form.framed:
        start = form.resumed(lark, start, after_text=thinking)
    return Grammar.lark(lark.text(start))


def may_call(
    dialect: Dialect,
    schemas: Schemas,
    control: Mapping[str, int],
    *,
    thinking: bool,
    content: Grammar | None = None,
    continues: bool = False,
) -> Grammar:
    """Build the grammar of answers that may call tools, with arguments that obey their schemas.

    Args:
        schemas: JSON Schema of each tool's arguments, by name.
        control: ids of the control tokens among the dialect's marks.
        thinking: the answer begins inside a thought.
        content: JSON Schema of an answer without a call; None allows any text.
        continues: the answer continues a turn that has begun, and `content` is of the new text.

    Raises:
        RequestError: such an answer looks like a call.
    """
    lark, form = Lark(control), dialect.form
    if content is not None and schemas and not form.opening:
        raise RequestError(
            "this model writes calls as JSON, so beside tools the answer cannot have to be JSON, "
            "too; leave tools or the format out",
            param="tools",
        )
    before = _before(dialect, lark, thinking=thinking)
    text = None if content is None else lark.rule(f"%json {with_options(content.text)}")
    plain = form.plain(lark, text)
    if not schemas:
        start = f"{before} {plain}"
    elif form.framed or not form.opening or text is not None:
        start = f"{before} ({lark.mark(form.opening)} {_calls(dialect, schemas, lark)} | {plain})"
    else:
        start = f"{before} ({lark.until(form.opening)} {_calls(dialect, schemas, lark)})* {plain}"
    if continues and form.framed:
        start = form.resumed(lark, start, after_text=thinking or text is None)
        if not thinking:
            start = f"({start} | {text or lark.rule(ANY_TEXT)})"
    return Grammar.lark(lark.text(start))


def _calls(dialect: Dialect, schemas: Schemas, lark: Lark) -> str:
    """Return the grammar of calls to these tools, after the opening mark."""
    frames = [dialect.form.frame(name, _closed(one), lark) for name, one in schemas.items()]
    return lark.rule(" | ".join(frames))


def _before(dialect: Dialect, lark: Lark, *, thinking: bool) -> str:
    """Return the grammar of an optional thought before a call."""
    form, marks = dialect.form, dialect.thought_marks
    if form.framed:
        return form.remarks(lark)
    if marks is None:
        return ""
    rest = f"{lark.until(marks.closing)} {lark.rule(_SPACE)}"
    return rest if thinking else f"({lark.mark(marks.opening)} {rest})?"


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Forbid undescribed arguments: a small model keeps inventing them."""
    if "properties" not in schema or any(key in schema for key in _COMBINING):
        return schema
    return {**schema, "additionalProperties": False}
