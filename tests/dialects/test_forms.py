"""Every form of a call is read back as it was written, however the text is cut."""

# ruff: noqa: E501, RUF001 - texts as models and templates have them

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.dialects import CallArguments, CallBegin, Content, Part, Reader, Thought
from appliance.dialects.formats.form import CallForm
from appliance.dialects.learn import FORMS
from appliance.dialects.source import Source, Steps
from appliance.dialects.thoughts import ThoughtMarks, then_content

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}}},
    "save": {
        "type": "object",
        "properties": {"text": {"type": "string"}, "lines": {"type": "array"}, "deep": {}},
    },
}
MARKS = ThoughtMarks("<think>", "</think>")
by_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)

# Pieces of texts of users and models, including the marks of all forms.
PIECES = [
    "a",
        "é",
        "🎈",
        " ",
        "\n",
        '"',
        "\\",
        "{",
        "}",
        "[",
        "]",
        "<",
        ">",
        ":",
        ",",
        ";",
        "1",
        "null",
    "<think>",
        "</think>",
        '{"name": "weather", ',
        '"arguments": {',
        '"city": "Oslo"}',
        "call:weather",
    *(mark for form in FORMS for mark in form.marks),
]  # fmt: skip
texts = st.lists(st.sampled_from(PIECES), max_size=24).map("".join)
# A value between marks cannot hold these, nor begin or end with what separates it from them.
words = st.text(st.characters(exclude_characters="<>[]|`｜", codec="utf-8"), max_size=12).map(
    str.strip
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": words,
        "lines": st.lists(st.one_of(words, st.integers(), st.booleans(), st.none()), max_size=3),
        "deep": st.dictionaries(st.sampled_from(["a", "b"]), st.lists(st.integers(), max_size=2)),
    },
)


def reader(
    form: CallForm, *, thinking: bool = False, one_call: bool = False, must_call: bool = False
) -> Reader:
    def read(source: Source) -> Steps[None]:
        return form.read(source, SCHEMAS)

    parse = then_content(MARKS, thinking, read)
    return Reader(parse, one_call=one_call, must_call=must_call)


def joined(parts: list[Part]) -> list[Part]:
    """Parts, with those that belong together joined."""
    whole: list[Part] = []
    for part in parts:
        last = whole[-1] if whole else None
        if isinstance(part, CallBegin) or type(part) is not type(last):
            whole.append(part)
        else:
            whole[-1] = type(part)(last.text + part.text)
    return whole


def read(form: CallForm, *pieces: str, was_cut: bool = False, **options: bool) -> list[Part]:
    one = reader(form, **options)
    parts = [part for piece in pieces for part in one.push(piece)]
    return joined(parts + one.finish(cut=was_cut))


def cut(text: str, places: list[int]) -> list[str]:
    bounds = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(bounds)]


@by_form
@settings(max_examples=20, deadline=None)
@given(texts, st.lists(st.integers(0, 500), max_size=8), st.booleans(), st.booleans())
def test_any_text_gives_the_same_however_it_is_cut(
    form: CallForm, text: str, places: list[int], thinking: bool, one_call: bool
) -> None:
    whole = read(form, text, thinking=thinking, one_call=one_call)
    assert read(form, *cut(text, places), thinking=thinking, one_call=one_call) == whole
    assert read(form, *text, thinking=thinking, one_call=one_call) == whole


@by_form
@settings(max_examples=12, deadline=None)
@given(arguments, st.lists(st.integers(0, 500), max_size=5))
def test_a_call_is_read_back(form: CallForm, values: dict[str, Any], places: list[int]) -> None:
    text = form.write("save", json.dumps(values, ensure_ascii=False))
    begin, given_arguments = read(form, *cut(text, places))
    assert begin == CallBegin("save")
    assert isinstance(given_arguments, CallArguments)
    assert json.loads(given_arguments.text) == values


@by_form
def test_thought_and_text_come_before_a_call(form: CallForm) -> None:
    call = form.write("weather", '{"city": "Oslo"}')
    if form.framed:
        text = (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
            f"<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant{call}"
        )
    elif not form.opening:
        text = f"<think>\nHm.\n</think>\n\nLet me see.\n{form.marks[0]}{call}"
    else:
        text = f"<think>\nHm.\n</think>\n\nLet me see.\n{call}\n"
    expected = [Thought("Hm."), Content("Let me see."), CallBegin("weather")]
    assert read(form, text)[:-1] == expected
    assert json.loads(read(form, text)[-1].text) == {"city": "Oslo"}  # type: ignore[union-attr]


@by_form
def test_every_beginning_of_a_call_loses_no_call_that_has_begun(form: CallForm) -> None:
    call = form.write("weather", '{"city": "Oslo \\"x\\""}')
    begun = False
    for length in range(len(call) + 1):
        parts = read(form, call[:length])
        calls = [part for part in parts if isinstance(part, CallBegin)]
        assert calls in ([CallBegin("weather")], [])
        begun = begun or bool(calls)
        assert bool(calls) == begun
        if begun:
            assert not any(isinstance(part, Content) for part in parts)
    assert begun


@by_form
def test_only_the_first_call_counts_if_one_is_wanted(form: CallForm) -> None:
    call = form.write("weather", '{"city": "Oslo"}')
    both = call + "<|start|>assistant" * form.framed + call
    if not form.opening:
        both = f"{call};{call}" if form.name == "llama" else f"{call[:-1]}, {call[1:]}"
    assert len([part for part in read(form, both) if isinstance(part, CallBegin)]) == 2
    one = reader(form, one_call=True)
    parts = one.push(both)
    assert one.ended
    assert [type(part) for part in joined(parts)] == [CallBegin, CallArguments]


@by_form
def test_what_is_cut_of_a_call_is_a_call_or_nothing(form: CallForm) -> None:
    call = form.write("weather", '{"city": "Oslo \\"x\\""}')
    for length in range(len(call) + 1):
        parts = read(form, call[:length], must_call=True)
        assert not any(isinstance(part, Content) for part in parts), call[:length]
        if form.opening and not form.framed:  # their marks are control tokens, which arrive whole
            assert read(form, call[:length], was_cut=True) == parts
            after_text = read(form, f"So:{call[:length]}", was_cut=True)
            assert after_text == [Content("So:"), *parts]
    for text in ("a", "a < b", '{"title": "x', "[1, 2", "it [weather"):
        assert read(form, text, was_cut=True) == [Content(text)]


@by_form
@settings(max_examples=10, deadline=None)
@given(st.lists(st.sampled_from(["Oslo", "Rome", "Os"]), min_size=1, max_size=5), st.booleans())
def test_a_call_that_comes_again_ends_an_answer_that_has_to_call(
    form: CallForm, cities: list[str], in_pieces: bool
) -> None:
    calls = [form.write("weather", json.dumps({"city": city})) for city in cities]
    text = ("<|start|>assistant" * form.framed).join(calls)
    if not form.opening:
        text = ";".join(calls)
        if form.name != "llama":
            text = f"[{', '.join(call[1:-1] for call in calls)}]"
    until_again: list[str] = []
    for city in cities:
        if city in until_again:
            break
        until_again.append(city)
    one = reader(form, must_call=True)
    parts = [part for piece in (text if in_pieces else [text]) for part in one.push(piece)]
    assert one.ended == (len(until_again) < len(cities))
    found = [p for p in joined(parts + one.finish()) if isinstance(p, CallArguments)]
    assert [json.loads(part.text)["city"] for part in found] == until_again
    everything = [p for p in read(form, text) if isinstance(p, CallBegin)]
    assert len(everything) == len(cities), "where the model may choose, it may mean it"


@by_form
def test_plain_text_is_content(form: CallForm) -> None:
    text = ' a "b" {c} <d> [e] \n\n f '
    assert read(form, text) == [Content(text)]
    assert read(form, "  ") == [Content("  ")]
    assert read(form, "") == []


MALFORMED = [
    ("hermes", "<tool_call>\nweather(Oslo)\n</tool_call> ok"),
    ("hermes", '<tool_call>{"city": "Oslo"}</tool_call>'),
    ("hermes", '<tool_call>{"name": 5}</tool_call>'),
    ("hermes", '<tool_call>{"na'),
    ("llama", '{"name": "Alice", "parameters": {"age": 3}}'),
    ("llama", '[1, 2] {"name": "weather", "parameters": {}}'),
    ("llama", '<|python_tag|>print("hi")'),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral (list)", "[TOOL_CALLS] [weather]"),
    ("qwen coder", "<tool_call>weather</tool_call>"),
    ("qwen coder", "x <function= y"),
    ("glm", '<tool_call>{"name": "weather"}</tool_call>'),
    ("glm", "<tool_call>I would call the weather</tool_call>"),
    ("gemma 4", "<|tool_call>weather<tool_call|>"),
    ("function gemma", "<start_function_call>call:weather()<end_function_call>"),
    ("llama", "[weather]"),
    ("llama", "[clock(city='Oslo')]"),
    ("pythonic (bare)", "[1, 2] [weather()]"),
    ("pythonic (bare)", "[weather[0](1)]"),
    ("pythonic", "<|tool_call_start|>weather()<|tool_call_end|>"),
    ("deepseek", "<｜tool▁calls▁begin｜>weather<｜tool▁calls▁end｜>"),
    ("deepseek (fenced)", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather {}"),
]


@pytest.mark.parametrize(("name", "text"), MALFORMED)
def test_what_is_no_call_is_content_and_complete(name: str, text: str) -> None:
    (form,) = [form for form in FORMS if form.name == name]
    assert read(form, text) == [Content(text)]


VARIANTS: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("hermes", '<tool_call>{"arguments": {"city": "Oslo"}, "name": "weather"}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}', []),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "weather"}</tool_call>', [("weather", "{}")]),
    ("hermes", '<tool_call>{"name":"weather","arguments":null}</tool_call>', [("weather", "{}")]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"a": [1,  2]}}', [("weather", '{"a": [1,  2]}')]),
    ("llama", '{"type": "function", "name": "weather", "parameters": {"city": "Oslo"}}', []),
    ("mistral", '[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Oslo"}', []),
    ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}, "id": "abcdefghi"}]', []),
    ("mistral (list)", '[TOOL_CALLS]weather{"city": "Oslo"}', []),
    ("qwen coder", "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>", []),
    ("qwen coder", "<tool_call>\n<function=weather>\n</function>\n</tool_call>", [("weather", "{}")]),
    ("qwen coder", "<function=weather><parameter=city>12</parameter></function>", [("weather", '{"city": "12"}')]),
    ("qwen coder", "<function=x><parameter=n>12</parameter></function>", [("x", '{"n": 12}')]),
    ("glm", "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>", []),
    ("gemma 4", '<|tool_call>call:weather{city:<|"|>Oslo<|"|>}<tool_call|>', []),
    ("gemma 4", "<|tool_call>call:x{a:{b:[1,true]},c:red}<tool_call|>", [("x", '{"a": {"b": [1, true]}, "c": "red"}')]),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
     '{"city": "Oslo"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', []),
    ("llama", "[weather(city='Oslo')]", []),
    ("llama", '[weather(city="Oslo"), weather()]', [("weather", '{"city": "Oslo"}'), ("weather", "{}")]),
    ("pythonic", "<|tool_call_start|>[weather( city = 'Oslo' , )]", []),
    ("pythonic", "<|tool_call_start|>[x(a=[1, 'b', None,], d={'k': True, \"l\": -1.5})]<|tool_call_end|>",
     [("x", '{"a": [1, "b", null], "d": {"k": true, "l": -1.5}}')]),
    ("pythonic", "<|tool_call_start|>[x(a='it\\'s \\\\ \\n \\x41\\u00e9 \"b\"')]<|tool_call_end|>",
     [("x", '{"a": "it\'s \\\\ \\n Aé \\"b\\""}')]),
    ("pythonic (bare)", "\n[weather(city=\"Oslo\")]\n", []),
    ("pythonic (bare)", "<|python_start|>[weather(city=\"Oslo\")]<|python_end|>", []),
    ("harmony", ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>', []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "calls"), VARIANTS)
def test_other_ways_to_write_the_same(name: str, text: str, calls: list[tuple[str, str]]) -> None:
    (form,) = [form for form in FORMS if form.name == name]
    found = read(form, text)
    expected = calls or [("weather", '{"city": "Oslo"}')]
    assert found == [p for n, a in expected for p in (CallBegin(n), CallArguments(a))]


def test_a_thought_begins_an_answer_or_is_none() -> None:
    (hermes,) = [form for form in FORMS if form.name == "hermes"]
    assert read(hermes, "  <think>a</think>b") == [Thought("a"), Content("b")]
    assert read(hermes, "b <think>a</think>") == [Content("b <think>a</think>")]
    assert read(hermes, "a\n</think>\n\nb", thinking=True) == [Thought("a"), Content("b")]
    assert read(hermes, "<think>\na</think>b", thinking=True) == [Thought("a"), Content("b")]
    assert read(hermes, "never ends", thinking=True) == [Thought("never ends")]
    assert read(hermes, "<think></think>\n\nb") == [Content("b")]
    assert read(hermes, "<think>a</think></think>\nb") == [Thought("a"), Content("b")]


def test_arguments_come_in_pieces() -> None:
    (hermes,) = [form for form in FORMS if form.name == "hermes"]
    one = reader(hermes)
    pieces = [part for c in hermes.write("weather", '{"city": "Oslo"}') for part in one.push(c)]
    assert pieces[0] == CallBegin("weather")
    assert [type(part) for part in pieces[1:]] == [CallArguments] * len('{"city": "Oslo"}')
