"""The cost of schemas, grammars, expressions and tools grows with their size alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import cycle, islice
from typing import Any

import pytest
from hypothesis import strategies as st
from support.server.cost_doors import NAMES, UNITS, Doors, halves, lenient, names, repeated
from support.server.growth import CountedText as T

from appliance.dialects import learn
from appliance.dialects.constrain import may_call, must_call
from appliance.dialects.dialect import Dialect
from appliance.grammar.grammar import Grammar, canonical_schema
from appliance.grammar.regular import regular
from appliance.server.requests.grammars import check_token_names
from appliance.server.requests.tools import Offer, Tools, allowed

DOORS = Doors()
door = DOORS.door

# ---- tools, schemas, grammars ----

_LEAVES = st.sampled_from([
    {"type": "string"}, {"const": "a"}, {"enum": ["a", "b"]}, {"type": "integer", "minimum": 0},
    {"$ref": "#/$defs/name_0"}, {"$ref": "#"}, {}, True,
    {"type": "string", "pattern": "a/b", "maxLength": 3},
])  # fmt: skip
_PARTS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda one: {"type": "array", "items": one}, inner),
        st.builds(lambda several: {"oneOf": several}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda several: {"anyOf": several}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(
            lambda one: {"type": "object", "properties": {"a": one}, "required": ["a"]}, inner
        ),
    ),
    max_leaves=5,
)
_WHERE = st.sampled_from(
    ["properties", "required", "$defs", "oneOf", "oneOf of refs", "enum", "many", "chain"]
)


def schema_of(shape: Any, size: int) -> dict[str, Any]:
    part, where, needed = shape
    listed = list(names("distinct", size))
    inner: dict[T, Any] = dict.fromkeys(listed, part)
    defs: dict[str, Any] = {
        "name_0": {"type": "object", "properties": {"k": {"const": "0"}}, "required": ["k"]}
    }
    schema: dict[str, Any] = {"type": "object", "properties": {"a": part}, "$defs": defs}
    match where:
        case "properties":
            schema["properties"] = inner
        case "required":
            schema |= {"properties": inner, "required": listed}
        case "$defs":
            schema["$defs"] = {**inner, **defs}
        case "oneOf":
            schema["properties"] = {"a": {"oneOf": [
                {
                    "type": "object",
                    "properties": {"k": {"const": name}},
                    "required": ["k", *listed[:9]],
                }
                for name in listed
            ]}}  # fmt: skip
        case "oneOf of refs":
            schema["$defs"] = {
                str(i): {
                    "type": "object",
                    "properties": {"k": {"const": str(i)}},
                    "required": ["k", *listed],
                }
                for i in range(8)
            }
            several = {"oneOf": [{"$ref": f"#/$defs/{i}"} for i in range(8)]}
            schema["properties"] = dict.fromkeys(listed, several)
        case "enum":
            schema["properties"] = {"a": {"enum": listed}}
        case "chain":
            schema |= {"properties": {"a": {"$ref": "#/$defs/0"}}, "required": ["a"]}
            schema["$defs"] = {
                str(i): {
                    "type": "object",
                    "properties": {"a": {"$ref": f"#/$defs/{i + 1}"}},
                    "required": ["a"],
                }
                for i in range(size)
            } | {str(size): part}
        case "many":
            schema["properties"] = {
                name: {"type": "object", "properties": {"a": part}} for name in listed
            }
    if needed:
        schema.setdefault("required", listed[:1])
    return schema


_SCHEMAS = st.tuples(_PARTS, _WHERE, st.booleans())


@door(
    _SCHEMAS,
    20,
    (True, "oneOf of refs", False),
    ({"$ref": "#"}, "properties", False),
    ({"type": "string"}, "chain", True),
)
def schema(shape: Any, size: int) -> Callable[[], object]:
    given = schema_of(shape, size)
    return lenient(lambda: canonical_schema(given))


@door(
    st.tuples(_SCHEMAS, st.sampled_from(learn.FORMS), st.booleans()),
    15,
    *(
        ((part, "properties", False), form, True)
        for part in ({"type": "string"}, {"$ref": "#"})
        for form in (learn.FORMS[1], learn.FORMS[-2])
    ),
    *(
        (({"type": "string"}, "required", False), form, True)
        for form in (learn.FORMS[1], learn.FORMS[-2])
    ),
)
def tools_grammar(shape: Any, size: int) -> Callable[[], object]:
    parts, form, one_tool = shape
    given = schema_of(parts, size)
    schemas: Mapping[str, Any] = (
        {"f": given} if one_tool else dict.fromkeys(map(str, names("distinct", 8)), given)
    )
    dialect = Dialect(form, True, True, False, True, None)

    def build() -> None:
        lenient(lambda: must_call(dialect, schemas, {}, one_call=False, thinking=False))()
        lenient(lambda: may_call(dialect, schemas, {}, thinking=False))()

    return build


@door(st.tuples(_PARTS, NAMES), 40)
def tools(shape: Any, size: int) -> Callable[[], object]:
    part, kind = shape
    inner = dict.fromkeys(names(kind, size), part)
    offers = [
        Offer(f"f{i}", {"type": "object", "properties": inner}, "tools", "d") for i in range(4)
    ]
    choice = [T(f"f{number % 4}") for number in range(size)]

    def check() -> None:
        lenient(lambda: Tools.of(offers))()
        lenient(lambda: allowed(offers, choice))()

    return check


_PIECES_OF_PATTERNS = st.lists(
    st.sampled_from(
        [
            "[^",
            '[^"',
            "]",
            "(?=a)",
            "(?!a)",
            "(?!.*a)",
            "(?=",
            "(",
            ")",
            "(?:",
            "a|",
            "\\",
            "{1,",
            "*",
        ]
    ),
    min_size=1,
    max_size=3,
)


@door(
    st.tuples(_PIECES_OF_PATTERNS, st.booleans()),
    200,
    (["[^"], False),
    (["(?=a)"], True),
)
def patterns(shape: Any, size: int) -> Callable[[], object]:
    pattern = "^" * shape[1] + halves(shape[0], size)
    text = {"type": "string", "pattern": pattern}

    def make() -> None:
        lenient(lambda: canonical_schema(text))()
        lenient(lambda: canonical_schema({"not": text}))()
        lenient(lambda: canonical_schema({"patternProperties": {pattern: {}, "b": {}}}))()
        lenient(lambda: Grammar.regex(pattern))()

    return make


@door(UNITS, 2000)
def names_of_tokens(shape: Any, size: int) -> Callable[[], object]:
    text = halves(shape, size)
    return lenient(lambda: check_token_names(text, {"<a>"}, 10))


@door(UNITS, 500)
def choices_and_expressions(shape: Any, size: int) -> Callable[[], object]:
    texts = [repeated(shape, 5) for _ in range(size)]

    def make() -> None:
        lenient(lambda: Grammar.choice(texts))()
        lenient(lambda: Grammar.lark("".join(texts)))()
        lenient(lambda: Grammar.schema_as_given("".join(texts)))()

    return make


# ---- grammars of custom tools ----

_RULES = st.sampled_from(
    ["a", '"b"', "/[c-e]+/", "_f", "(g | h)", '["i"]*', "j~2..3", "// k\n", "l."]
)


def _grammar_of(shape: Any, size: int) -> str:
    """Rules in a row, each of which refers to the next, the first or itself; or one long rule."""
    pieces, where = shape
    whole = " ".join(islice(cycle(pieces), size))
    others = "".join(f"{name}: {pieces[0]}\n" for name in ("a", "g", "h", "j", "l", "_f"))
    match where:
        case "long":
            return f"start: {whole}\n{others}"
        case "choices":
            return f"start: {whole.replace(' ', ' | ')}\n{others}"
        case "nested":
            return f"start: {'(' * size}{whole}{')' * size}\n{others}"
        case "text":
            return f'start: "{whole.replace(chr(34), "")}"\n'
        case "ignored":
            return "start: a\n" + others + f"%ignore {pieces[0]}\n" * size
        case "doubled":
            count = 2 * size.bit_length()
            rules = [f"r{i}: r{i + 1} r{i + 1}\n" for i in range(count)]
            return f"start: r0\n{''.join(rules)}r{count}: {pieces[0]}\n{others}"
    following = {"first": "r0", "itself": "r{}", "next": "r{}"}[where]
    rules = [
        f"r{i}: {pieces[0]} | {following.format(i + (where == 'next'))}\n" for i in range(size)
    ]
    used = " ".join(f"r{i}" for i in range(size))
    return f"start: {used}\n{others}{''.join(rules)}r{size}: {pieces[-1]}\n"


@door(
    st.tuples(
        st.lists(_RULES, min_size=1, max_size=3),
        st.sampled_from(
            ["long", "choices", "nested", "text", "ignored", "doubled", "first", "itself", "next"]
        ),
    ),
    20,
    *((['"b"'], where) for where in ("long", "first", "next", "doubled")),
)
def custom_tools(shape: Any, size: int) -> Callable[[], object]:
    grammar = _grammar_of(shape, size)
    return lenient(lambda: regular(grammar))


@door(
    st.lists(st.sampled_from(["x ", '"y" ', "[^z]+ ", "( x ", ") ", "| ", "# w\n"]), min_size=1,
             max_size=4),
    20,
)  # fmt: skip
def gbnf(shape: Any, size: int) -> Callable[[], object]:
    rules = "".join(f"x{i} ::= {repeated(shape, 20)}\n" for i in range(size))
    text = f"root ::= x\nx ::= {repeated(shape, size)}\n{rules}"
    return lenient(lambda: Grammar.lark(text))


@pytest.mark.parametrize("name", DOORS)
def test_costs_grow_as_the_input_does(name: str) -> None:
    DOORS.check(name)
