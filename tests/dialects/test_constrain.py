"""Grammars of calls: an answer that they allow is read as a call that obeys its schema."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from appliance.dialects import CallArguments, CallBegin, Content, Dialect, Thought
from appliance.dialects.constrain import may_call, must_call
from appliance.dialects.formats.form import CallForm
from appliance.dialects.learn import FORMS
from appliance.dialects.thoughts import ThoughtMarks
from appliance.errors import RequestError
from appliance.grammar import Grammar
from appliance.grammar.check import problem_of
from appliance.grammar.source import limits, source_of

EOS = 256
MARKS = ThoughtMarks("<think>", "</think>")
SCHEMAS: dict[str, dict[str, Any]] = {
    "go": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Oslo", 'Saint "Y"']},
            "n": {"type": "integer", "minimum": 0, "maximum": 99},
            "deep": {
                "type": "object",
                "properties": {"ok": {"type": "boolean"}},
                "additionalProperties": False,
            },
            "many": {"type": "array", "items": {"enum": [1, 2, None]}, "maxItems": 2},
        },
        "required": ["city", "n"],
    },
    "stop": {"type": "object", "properties": {}},
}
by_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
by_kind = pytest.mark.parametrize("are_control", [False, True], ids=["text", "control"])


class Words:
    """A vocabulary of bytes, an end token, and optionally marks that are tokens."""

    is_tokenizer_wrapper = True
    eos_token_id, bos_token_id = EOS, None

    def __init__(self, marks: tuple[str, ...]) -> None:
        self.control = {mark: EOS + 1 + place for place, mark in enumerate(marks)}
        self.tokens = [bytes([n]) for n in range(256)] + [b"<eos>", *(m.encode() for m in marks)]
        self.special_token_ids = [EOS, *self.control.values()]

    def __call__(self, text: str) -> list[int]:
        raise AssertionError

    def encode(self, text: str) -> list[int]:
        if not self.control:
            return list(text.encode())
        pieces = re.split(f"({'|'.join(map(re.escape, self.control))})", text)
        return [t for p in pieces for t in ([self.control[p]] if p in self.control else p.encode())]

    def matcher(self, grammar: Grammar) -> LLMatcher:
        tokenizer = LLTokenizer(TokenizerWrapper(self))
        matcher = LLMatcher(tokenizer, source_of(grammar), limits=limits())
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def accepts(self, grammar: Grammar, text: str) -> bool:
        matcher, tokens = self.matcher(grammar), self.encode(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    def walk(self, grammar: Grammar, seed: int) -> str:
        """The answer of a model that chooses any allowed token, and ends when it may."""
        matcher, chosen, dice = self.matcher(grammar), [], random.Random(seed)
        mask = allocate_token_bitmask(1, len(self.tokens))
        while not matcher.is_stopped() and not matcher.is_accepting():
            fill_next_token_bitmask(matcher, mask)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(self.tokens)]
            allowed = np.flatnonzero(bits).tolist()
            marks = [token for token in allowed if token > EOS]
            chosen.append(dice.choice(marks if marks and dice.random() < 0.5 else allowed))
            assert matcher.try_consume_tokens(chosen[-1:]) == 1
            assert len(chosen) < 500
        return b"".join(self.tokens[token] for token in chosen).decode()


def words(form: CallForm, are_control: bool) -> Words:
    return Words(tuple(filter(None, form.marks)) if are_control else ())


def dialect(form: CallForm, marks: ThoughtMarks | None = None) -> Dialect:
    return Dialect(form, True, True, False, True, marks)


def calls_in(one: Dialect, text: str, schemas: dict[str, Any] = SCHEMAS) -> list[tuple[str, Any]]:
    reader = one.reader(schemas)
    parts = reader.push(text) + reader.finish()
    calls: list[tuple[str, list[str]]] = []
    for part in parts:
        assert not isinstance(part, Content) or one.form.framed, text
        if isinstance(part, CallBegin):
            calls.append((part.name, []))
        elif isinstance(part, CallArguments):
            calls[-1][1].append(part.text)
    return [(name, json.loads("".join(pieces))) for name, pieces in calls]


@by_form
@by_kind
def test_an_answer_that_has_to_call_is_a_call_that_obeys(form: CallForm, are_control: bool) -> None:
    # By chance alone, Harmony's thoughts would hardly ever reach their whole end mark.
    vocabulary, one = words(form, are_control or form.framed), dialect(form)
    grammar = must_call(one, SCHEMAS, vocabulary.control, one_call=True, thinking=False)
    names = set()
    for seed in range(4):
        (call,) = calls_in(one, vocabulary.walk(grammar, seed))
        names.add(call[0])
        jsonschema.validate(call[1], SCHEMAS[call[0]] | {"additionalProperties": False})
    only = must_call(one, {"go": SCHEMAS["go"]}, vocabulary.control, one_call=True, thinking=False)
    ((name, _),) = calls_in(one, vocabulary.walk(only, 1))
    assert name == "go"
    assert not vocabulary.accepts(grammar, "Hello.")
    assert names <= {"go", "stop"}


@by_form
def test_the_form_that_templates_write_is_let_through(form: CallForm) -> None:
    vocabulary, one = words(form, True), dialect(form)
    schemas = {
        "say": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    }
    grammar = must_call(one, schemas, vocabulary.control, one_call=False, thinking=False)
    call = form.write("say", '{"text": "a é 🎈"}')
    assert vocabulary.accepts(grammar, call)
    assert vocabulary.accepts(grammar, f"{call}{form.between}{call}") == (form.between is not None)
    assert not vocabulary.accepts(grammar, form.write("go", "{}"))


@by_form
@by_kind
def test_schemas_are_obeyed_where_the_model_may_choose(form: CallForm, are_control: bool) -> None:
    vocabulary, one = words(form, are_control), dialect(form)
    grammar = may_call(one, SCHEMAS, vocabulary.control, thinking=False)
    good, bad = (
        form.write("go", '{"city": "Oslo", "n": 5}'),
        form.write("go", '{"city": "Rome", "n": 5}'),
    )
    text = "<|channel|>final<|message|>Hm. {}" if form.framed else "Hm. {} \n"
    assert vocabulary.accepts(grammar, text)
    assert vocabulary.accepts(grammar, good)
    assert not vocabulary.accepts(grammar, bad)
    assert vocabulary.accepts(grammar, form.write("stop", "{}"))
    if form.opening and not form.framed:
        assert vocabulary.accepts(grammar, f"Hm. {good}")
        assert not vocabulary.accepts(grammar, f"Hm. {bad}")


@by_form
def test_beside_tools_an_answer_can_be_json(form: CallForm) -> None:
    vocabulary, one = words(form, True), dialect(form)
    content = Grammar.json_schema(
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        }
    )
    for schemas in ({}, SCHEMAS):
        if schemas and not form.opening:
            with pytest.raises(RequestError, match="writes calls as JSON"):
                may_call(one, schemas, {}, thinking=False, content=content)
            return
        grammar = may_call(one, schemas, vocabulary.control, thinking=False, content=content)
        head = "<|channel|>final<|message|>" if form.framed else ""
        assert vocabulary.accepts(grammar, head + '{"a": 5}')
        assert not vocabulary.accepts(grammar, head + '{"a": "b"}')
        call = form.write("go", '{"city": "Oslo", "n": 5}')
        assert vocabulary.accepts(grammar, call) == bool(schemas)


@pytest.mark.parametrize("control", [(), ("<think>", "</think>")], ids=["text", "control"])
def test_a_thought_comes_first(control: tuple[str, ...]) -> None:
    (hermes,) = [form for form in FORMS if form.name == "hermes"]
    vocabulary, one = Words(control), dialect(hermes, MARKS)
    call = hermes.write("stop", "{}")
    for thinking, text in (
        (False, f"<think>Hm.\n</think>\n\n{call}"),
        (True, f"Hm.</think>{call}"),
    ):
        grammar = must_call(one, SCHEMAS, vocabulary.control, one_call=True, thinking=thinking)
        assert vocabulary.accepts(grammar, text)
        assert vocabulary.accepts(grammar, call) != thinking
        reader = one.reader(SCHEMAS, thinking=thinking)
        assert reader.push(text)[:2] == [Thought("Hm."), CallBegin("stop")]


def test_harmony_thinks_before_it_calls() -> None:
    (harmony,) = [form for form in FORMS if form.framed]
    vocabulary, one = words(harmony, True), dialect(harmony)
    grammar = must_call(one, SCHEMAS, vocabulary.control, one_call=True, thinking=False)
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert vocabulary.accepts(grammar, thought + harmony.write("stop", "{}"))


def test_gemmas_values_follow_references_and_alternatives() -> None:
    (gemma,) = [form for form in FORMS if form.name == "gemma 4"]
    schema = {
        "type": "object",
        "$defs": {"size": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
        "properties": {
            "a": {"$ref": "#/$defs/size"},
            "b": {},
            "c": {"type": ["boolean", "number"]},
        },
    }
    vocabulary, one = words(gemma, True), dialect(gemma)
    grammar = must_call(one, {"f": schema}, vocabulary.control, one_call=True, thinking=False)
    for arguments in ("{}", '{"a": 5}', '{"a": null, "b": "x", "c": 1.5}', '{"b": 5, "c": true}'):
        assert vocabulary.accepts(grammar, gemma.write("f", arguments)), arguments
    for arguments in ('{"a": "x"}', '{"c": null}', '{"d": 1}'):
        assert not vocabulary.accepts(grammar, gemma.write("f", arguments)), arguments


def test_gemmas_texts_obey_patterns_and_lengths() -> None:
    schema = {
        "type": "object",
        "properties": {
            "code": {"type": "string", "pattern": "^[A-Z]{2}/[0-9]+$"},
            "part": {"type": "string", "pattern": "b+", "maxLength": 4},
            "name": {"type": "string", "minLength": 2, "maxLength": 3},
        },
    }
    for form in [form for form in FORMS if "gemma" in form.name]:
        for are_control in (True, False):
            vocabulary, one = words(form, are_control), dialect(form)
            grammar = must_call(
                one, {"f": schema}, vocabulary.control, one_call=True, thinking=False
            )
            for good in ({"code": "AB/1"}, {"part": "b"}, {"part": "aabb"}, {"name": "é\n"}):
                assert vocabulary.accepts(grammar, form.write("f", json.dumps(good))), good
            for bad in ({"code": "AB/1x"}, {"code": "a"}, {"part": "aa"}, {"part": "aaabb"},
                        {"name": "x"}, {"name": "abcd"}):  # fmt: skip
                assert not vocabulary.accepts(grammar, form.write("f", json.dumps(bad))), bad


def test_a_pattern_that_no_grammar_has_is_refused_and_not_left_out() -> None:
    (gemma,) = [form for form in FORMS if form.name == "gemma 4"]
    vocabulary, one = words(gemma, True), dialect(gemma)
    for pattern in ("(?=a)b", "(", "[a/\nstart: x"):
        schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}
        grammar = must_call(one, {"f": schema}, vocabulary.control, one_call=True, thinking=False)
        problem = problem_of(grammar)
        assert problem is not None, pattern


def test_arguments_of_python_are_those_of_the_schema() -> None:
    (pythonic,) = [form for form in FORMS if form.name == "pythonic"]
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}, "c": {}},
        "required": ["b"],
    }
    vocabulary, one = words(pythonic, True), dialect(pythonic)
    grammar = must_call(one, {"f": schema}, vocabulary.control, one_call=True, thinking=False)
    for good in ({"b": True}, {"b": False, "a": 5}, {"b": True, "a": 1, "c": [1, "x"]}):
        assert vocabulary.accepts(grammar, pythonic.write("f", json.dumps(good))), good
    for bad in ({}, {"a": 5}, {"b": 1}, {"b": True, "d": 1}):
        assert not vocabulary.accepts(grammar, pythonic.write("f", json.dumps(bad))), bad


@by_form
@by_kind
def test_a_text_obeys_its_pattern_in_every_form(form: CallForm, are_control: bool) -> None:
    """The input of a custom tool obeys a grammar; Python's `re` finds the matches."""
    pattern = r"(?:(?:a\n)(?:(?:\+[bc]*\n)){0,2}(?:[\"]))"
    text = {"type": "string", "pattern": f"^(?:{pattern})$"}
    schemas = {"go": {"type": "object", "properties": {"input": text}, "required": ["input"]}}
    vocabulary, one = words(form, are_control or form.framed), dialect(form)
    grammar = must_call(one, schemas, vocabulary.control, one_call=True, thinking=False)
    for seed in range(4):
        ((_, arguments),) = calls_in(one, vocabulary.walk(grammar, seed), schemas)
        assert re.fullmatch(pattern, arguments["input"]), arguments


@pytest.mark.parametrize("begun", ["<|channel|>final<|message|>", "<|channel|>analysis<|message|>"])
def test_harmony_continues_a_turn_with_a_call_or_in_a_format(begun: str) -> None:
    form = next(form for form in FORMS if form.framed)
    thinking = "analysis" in begun
    vocabulary, one = words(form, True), dialect(form)
    reply = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    shape = Grammar.schema_as_given(reply)
    must = must_call(
        one, SCHEMAS, vocabulary.control, one_call=True, thinking=thinking, continues=True
    )
    may = may_call(
        one, SCHEMAS, vocabulary.control, thinking=thinking, content=shape, continues=True
    )
    strict = may_call(one, SCHEMAS, vocabulary.control, thinking=thinking, continues=True)
    again = "<|end|><|start|>assistant"
    call = form.write("go", '{"city": "Oslo", "n": 5}')
    wrong = form.write("go", '{"city": "Rome", "n": 5}')
    answer = (
        '{"ok": true}' if not thinking else f'x{again}<|channel|>final<|message|>{{"ok": true}}'
    )
    head = f"x{again}" if thinking else again
    for grammar, text, fits in (
        (must, head + call, True),
        (must, head + wrong, False),
        (must, answer, False),
        (may, head + call, True),
        (may, head + wrong, False),
        (may, answer, True),
        (may, answer.replace("true", "5"), False),
        (strict, f"x{again}" + call, True),
        (strict, f"x{again}" + wrong, False),
        (strict, answer, True),
    ):
        assert vocabulary.accepts(grammar, text) is fits, text
    reader = one.reader(SCHEMAS, begun=begun)
    parts = reader.push(head + call) + reader.finish()
    assert "".join(part.text for part in parts if isinstance(part, CallArguments)) == (
        '{"city": "Oslo", "n": 5}'
    )
    assert [type(part) for part in parts if not isinstance(part, CallArguments)] == [
        *([Thought] if thinking else []), CallBegin,
    ]  # fmt: skip
