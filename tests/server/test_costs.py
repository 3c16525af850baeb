"""What a body, a model or its answer costs grows as its size does, at every door.

Each door gets inputs of n, 2n, 4n and 8n in shapes that Hypothesis makes. `APPLIANCE_TEST_COSTS=N`
runs N shapes a door, and measures processor time as well: that is for quiet machines.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
from growth import CountedText as T
from growth import check_growth
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from appliance.dialects import learn
from appliance.dialects.constrain import may_call, must_call
from appliance.dialects.dialect import Dialect
from appliance.dialects.parts import CallArguments, CallBegin, Content, Part, Thought
from appliance.dialects.thoughts import KNOWN_MARKS
from appliance.dialects.turns import prepare
from appliance.engine.request import FinishReason
from appliance.errors import ApplianceError
from appliance.grammar.grammar import Grammar, canonical_schema
from appliance.grammar.token_names import check_token_names
from appliance.output import ChoiceText
from appliance.server import turns
from appliance.server.anthropic import messages
from appliance.server.anthropic import turns as anthropic_turns
from appliance.server.anthropic.schema import AnthropicTurn, ContentBlock, CountRequest
from appliance.server.body import decode_json
from appliance.server.ollama import turns as ollama_turns
from appliance.server.ollama.schema import (
    CalledByName,
    OllamaCall,
    OllamaTurn,
)
from appliance.server.openai_responses import turns as responses_turns
from appliance.server.openai_responses.history import InputReader
from appliance.server.openai_responses.output import OutputItems
from appliance.server.openai_responses.schema import InputPart, Item, ResponsesRequest
from appliance.server.openai_responses.store import ResponseStore
from appliance.server.prompt import _separate
from appliance.server.schema import (
    CalledFunction,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    Message,
    ToolCall,
)
from appliance.server.tools import Offer, Tools, allowed
from appliance.tokenizer import ChatTemplate, StopStringMatcher, Tokenizer

SHAPES = int(os.environ.get("APPLIANCE_TEST_COSTS", "0"))
Make = Callable[[Any, int], Callable[[], object]]
DOORS: dict[str, tuple[st.SearchStrategy[Any], Make, int, tuple[Any, ...]]] = {}

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}<|im_start|>assistant\n"
)
_UNITS = st.lists(
    st.text(st.sampled_from('ab \n"\\{}[](),:<>/|=1'), min_size=1, max_size=6),
    min_size=1,
    max_size=3,
)


def door(shapes: st.SearchStrategy[Any], size: int, *known: Any) -> Callable[[Make], None]:
    """Register a function that prepares a call from a shape and a size.

    Args:
        size: the smallest, at which a call takes some thousand instructions.
        known: shapes to try in any case.
    """

    def add(make: Make) -> None:
        DOORS[make.__name__.strip("_").replace("_", " ")] = (shapes, make, size, known)

    return add


def lenient(call: Callable[[], object]) -> Callable[[], object]:
    """Return the call; what it refuses must not cost more either."""

    def refusing() -> None:
        with contextlib.suppress(ApplianceError, msgspec.MsgspecError, ValueError, RecursionError):
            call()

    return refusing


def repeated(units: list[str], size: int) -> str:
    """Repeat some texts up to a length."""
    return "".join(islice(cycle(units), max(1, size // max(1, sum(map(len, units)) // len(units)))))


def halves(units: list[str], size: int) -> str:
    """Repeat the first text, then the others."""
    return repeated(units[:1], size // 2) + repeated(units[1:] or units, size // 2)


def names(kind: str, count: int) -> Iterator[T]:
    """Yield names: all equal, all different, or of a few."""
    for number in range(count):
        yield T(f"name_{0 if kind == 'equal' else number % 3 if kind == 'few' else number}")


_NAMES = st.sampled_from(["equal", "distinct", "few"])

# ---- bodies ----

_JSON = st.recursive(
    st.sampled_from([0, 1.5, True, None, "", "text", '"\\', "\u20ac"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


@door(
    st.tuples(
        _JSON, st.sampled_from(["messages", "prompt", "logit_bias", "stop", "tools", "x"]), _NAMES
    ),
    300,
)
def body(shape: Any, size: int) -> Callable[[], object]:
    value, field, kind = shape
    many: Any = [value] * size
    if kind != "equal":
        many = {
            str(name) + ("" if kind == "few" else "x"): value for name in names("distinct", size)
        }
    raw = json.dumps({"messages": [], "prompt": "", field: many}).encode()
    if kind == "few":  # keys that stand twice
        raw = b'{"' + b'":1,"'.join(str(i).encode() for i in range(size)) + b'":1}'

    def decode() -> None:
        for struct in (ChatRequest, CompletionRequest, ResponsesRequest, CountRequest):
            lenient(lambda struct=struct: decode_json(raw, struct))()  # type: ignore[misc]

    return decode


@door(st.tuples(st.lists(st.sampled_from(["", "a", 1]), min_size=1, max_size=3)), 500)
def token_and_text_lists(shape: Any, size: int) -> Callable[[], object]:
    prompts = list(islice(cycle(shape[0]), size))
    return lenient(lambda: _separate(prompts, "prompt"))


# ---- messages of each protocol ----


@door(st.tuples(_NAMES, _NAMES, st.booleans()), 60)
def openai_messages(shape: Any, size: int) -> Callable[[], object]:
    calls, results, parts = shape
    given = [
        Message(role="assistant", tool_calls=[
            ToolCall(function=CalledFunction(name=name, arguments={"a": [1]}), id=name)
            for name in names(calls, size)
        ]),
        *(Message(role="tool", content="x", tool_call_id=name) for name in names(results, size)),
        Message(role="user", content=[ContentPart(type="text", text="a")] * size if parts else "a"),
    ]  # fmt: skip
    return lenient(lambda: turns.turns_of(given))


@door(st.tuples(_NAMES, _NAMES, st.booleans()), 60)
def ollama_messages(shape: Any, size: int) -> Callable[[], object]:
    calls, results, apart = shape
    called = [
        OllamaCall(function=CalledByName(name=name, arguments={})) for name in names(calls, size)
    ]
    answers = [
        OllamaTurn(role="tool", tool_name=T(f"{'x' if apart else ''}{name}"))
        for name in names(results, size)
    ]
    given = [OllamaTurn(role="assistant", tool_calls=called), *answers]
    return lenient(lambda: ollama_turns.turns_of(given))


@door(st.tuples(_NAMES, _NAMES, st.sampled_from(["text", "thinking", "tool_use"])), 60)
def anthropic_messages(shape: Any, size: int) -> Callable[[], object]:
    calls, results, kind = shape
    blocks = [
        ContentBlock(type=kind, text="a", thinking="b", id=name, name=name, input={})
        for name in names(calls, size)
    ]
    answers = [
        ContentBlock(type="tool_result", tool_use_id=name, content="x")
        for name in names(results, size)
    ]
    request = CountRequest(
        model="m",
        messages=[
            AnthropicTurn(role="assistant", content=blocks),
            AnthropicTurn(role="user", content=answers),
        ],
    )
    return lenient(lambda: anthropic_turns.turns_of(request))


_ITEMS = st.lists(
    st.sampled_from(
        ["message", "reasoning", "empty", "function_call", "function_call_output", "item_reference"]
    ),
    min_size=1,
    max_size=4,
)


def _items(kinds: list[str], kind: str, size: int) -> list[Item]:
    made = {
        "message": lambda name: Item(
            type="message", role="user", content=[InputPart(type="text", text="a")]
        ),
        "reasoning": lambda name: Item(
            type="reasoning", id=name, summary=[InputPart(type="text", text="b")]
        ),
        "empty": lambda name: Item(type="reasoning", id=name, summary=[]),
        "function_call": lambda name: Item(
            type="function_call", call_id=name, name=name, arguments="{}"
        ),
        "function_call_output": lambda name: Item(
            type="function_call_output", call_id=name, output="c"
        ),
        "item_reference": lambda name: Item(type="item_reference", id=str(name)),
    }
    return [
        made[one](str(name)) for one, name in zip(cycle(kinds), names(kind, size), strict=False)
    ]


@door(st.tuples(_ITEMS, _NAMES), 80)
def responses_items(shape: Any, size: int) -> Callable[[], object]:
    items = [item for item in _items(shape[0], shape[1], size) if item.type != "item_reference"]
    return lenient(lambda: responses_turns.turns_of("Be brief.", b"[]", items))


@door(st.tuples(_ITEMS, _NAMES), 40)
def response_store(shape: Any, size: int) -> Callable[[], object]:
    """A conversation is kept, continued and named again."""

    def chain() -> None:
        store = ResponseStore()
        for number in range(3):
            body = ResponsesRequest(
                input=_items(shape[0], shape[1], size),
                previous_response_id=f"r{number - 1}" if number else None,
            )
            history = InputReader(store, "ann", body, max_bytes=10**6).read()
            whole = (
                b"["
                + b",".join(
                    part[1:-1]
                    for part in (history.before.conversation, history.own)
                    if part != b"[]"
                )
                + b"]"
            )
            store.keep(
                "ann", f"r{number}", b"{}", whole, history.names | history.before.names, slice(0)
            )

    return lenient(chain)


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
    ["properties", "required", "$defs", "oneOf", "oneOf of refs", "enum", "many"]
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
        case "many":
            schema["properties"] = {
                name: {"type": "object", "properties": {"a": part}} for name in listed
            }
    if needed:
        schema.setdefault("required", listed[:1])
    return schema


_SCHEMAS = st.tuples(_PARTS, _WHERE, st.booleans())


@door(_SCHEMAS, 20, (True, "oneOf of refs", False), ({"$ref": "#"}, "properties", False))
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


@door(st.tuples(_PARTS, _NAMES), 40)
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


@door(_UNITS, 2000)
def names_of_tokens(shape: Any, size: int) -> Callable[[], object]:
    text = halves(shape, size)
    return lenient(lambda: check_token_names(text, {"<a>"}, 10))


@door(_UNITS, 500)
def choices_and_expressions(shape: Any, size: int) -> Callable[[], object]:
    texts = [repeated(shape, 5) for _ in range(size)]

    def make() -> None:
        lenient(lambda: Grammar.choice(texts))()
        lenient(lambda: Grammar.lark("".join(texts)))()
        lenient(lambda: Grammar.schema_as_given("".join(texts)))()

    return make


# ---- templates and tokenizers ----

_TEXTS = st.lists(
    st.sampled_from(["a", "<|im_end|>", "<|im", "\n", "<", "Z1Z", "\u20ac ", "word "]),
    min_size=1,
    max_size=3,
)


@door(st.tuples(_TEXTS, st.booleans(), st.booleans()), 30)
def template_and_tokenizer(shape: Any, size: int) -> Callable[[], object]:
    units, many, calls = shape
    whole = repeated(units, size * 4)
    chat: list[dict[str, Any]] = [{"role": "user", "content": whole}]
    if many:
        chat = [{"role": "user", "content": repeated(units, 8)} for _ in range(size)]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    if calls:
        chat += [{"role": "assistant", "content": "", "tool_calls": [call] * size}]
        chat += [{"role": "tool", "content": "x", "tool_call_id": "c"}] * size
    tokenizer = _TOKENIZERS[0]
    plain = Dialect(learn.GENERIC, False, False, False, True, None)

    def encode() -> None:
        for dialect in (tokenizer.dialect, plain):
            given, _ = prepare(dialect, chat, None)
            lenient(lambda given=given: tokenizer.encode_chat(given))()  # type: ignore[misc]
        tokenizer.encode(whole, add_special_tokens=True)

    return encode


# ---- answers ----

_STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)


@door(st.tuples(_STOPS, _UNITS, st.integers(1, 9)), 200, (["a"], ["a"], 1))
def stop_strings(shape: Any, size: int) -> Callable[[], object]:
    stop, units, step = shape
    text = repeated([stop[0], *units], size)

    def push() -> None:
        matcher = StopStringMatcher(tuple(repeated([one], size // 4) + "\0" for one in stop))
        for begin in range(0, len(text), step):
            matcher.push(text[begin : begin + step])
        matcher.flush()

    return push


@door(st.tuples(st.lists(st.integers(0, 255), min_size=1, max_size=4), _STOPS), 300)
def detokenizer(shape: Any, size: int) -> Callable[[], object]:
    ids, stop = shape
    tokenizer = _TOKENIZERS[0]

    def push() -> None:
        text = ChoiceText(tokenizer, tuple(stop))
        for token_id in islice(cycle(ids), size):
            text.push((token_id,), None)
        text.push((), FinishReason.LENGTH)

    return push


def _marks(form: Any) -> st.SearchStrategy[list[str]]:
    pieces = [*form.marks, *(mark[: len(mark) // 2] for mark in form.marks), form.opening or "["]
    call = form.write("f", '{"a": "b", "c": [1, {"d": 2}]}')
    pieces += [
        call,
        call[: len(call) // 2],
        call[len(call) // 2 :],
        "<think>",
        "</think>",
        "[f(a=",
        "[",
        "{",
        '"',
        "\\",
    ]
    pieces += [" ", "\n", "a", "{}", "1, ", "f", '{"name": "f", "arguments": {']
    return st.lists(st.sampled_from([piece for piece in pieces if piece]), min_size=1, max_size=4)


def _reader_door(form: Any) -> None:
    def read(shape: Any, size: int) -> Callable[[], object]:
        units, step, must, marks, thinking = shape
        text = halves(units, size)
        dialect = Dialect(form, True, True, False, True, None if form.framed else marks)
        properties = {"a": {"type": "string"}}
        schemas = {"f": {"type": "object", "properties": properties}}

        def push() -> None:
            for pieces in ([text], [text[at : at + step] for at in range(0, len(text), step)]):
                reader = dialect.reader(schemas, thinking=thinking, must_call=must)
                for piece in pieces:
                    reader.push(piece)
                reader.finish(cut=True)

        return push

    read.__name__ = f"answers_in_the_form_{form.name}_{learn.FORMS.index(form)}"
    shapes = st.tuples(
        _marks(form),
        st.integers(1, 7),
        st.booleans(),
        st.sampled_from([None, *KNOWN_MARKS]),
        st.booleans(),
    )
    door(shapes, 150)(read)


for _form in learn.FORMS:
    _reader_door(_form)

_PIECES: st.SearchStrategy[list[Part]] = st.lists(
    st.sampled_from(
        [Content("a"), Thought("b"), CallBegin("f"), CallArguments('{"a": 1}'), Content(" ")]
    ),
    min_size=1,
    max_size=4,
)


@door(_PIECES, 200)
def parts_of_an_answer(shape: Any, size: int) -> Callable[[], object]:
    parts: list[Part] = [CallBegin("f"), *islice(cycle(shape), size)]

    def build() -> None:
        messages._blocks(parts)
        output = OutputItems({}, {}, short_ids=False, carries=True)
        for part in parts:
            output.push(part)
        output.close("completed")

    return build


_TOKENIZERS: list[Tokenizer] = []


@pytest.fixture(scope="module", autouse=True)
def _tokenizer(tokenizer_folder: Path) -> None:
    made = Tokenizer.from_path(tokenizer_folder)
    made.chat_template = ChatTemplate(CHATML, {})
    _TOKENIZERS[:] = [made]


@pytest.mark.parametrize("name", DOORS)
def test_costs_grow_as_the_input_does(name: str) -> None:
    shapes, make, size, known = DOORS[name]

    def measure(shape: Any) -> None:
        make(shape, size)()  # what is made once, such as a compiled expression
        check_growth(lambda n: make(shape, n), size, timed=bool(SHAPES))

    for shape in known:
        measure(shape)

    @settings(
        max_examples=SHAPES or 3,
        derandomize=not SHAPES,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(shapes)
    def check(shape: Any) -> None:
        measure(shape)

    check()
