"""The cost of a body, a model or an answer grows with its size alone, at every door.

Each door gets inputs of n, 2n, 4n and 8n in shapes that Hypothesis generates.
`APPLIANCE_TEST_COSTS=N` runs N shapes per door.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from fastapi import FastAPI
from hypothesis import strategies as st
from support.server.cost_doors import NAMES, UNITS, Doors, halves, lenient, names, repeated
from support.server.every_route import Call, Client
from support.server.growth import CountedText as T

from appliance.config import ServerConfig
from appliance.dialects import learn
from appliance.dialects.dialect import Dialect
from appliance.dialects.output import CallArguments, CallBegin, Content, Part, Thought
from appliance.dialects.thoughts import KNOWN_MARKS
from appliance.dialects.turns import prepare
from appliance.engine.nouns.request import FinishReason
from appliance.model_files.retrieval_recipe import EmbeddingRecipe, RerankRecipe
from appliance.model_files.sampling_defaults import SamplingDefaults
from appliance.server.anthropic import messages
from appliance.server.anthropic import turns as anthropic_turns
from appliance.server.anthropic.schema import AnthropicTurn, ContentBlock, CountRequest
from appliance.server.app import create_app
from appliance.server.http.body import decode_json
from appliance.server.models.state import ServerState
from appliance.server.ollama import turns as ollama_turns
from appliance.server.ollama.schema import (
    CalledByName,
    OllamaCall,
    OllamaTurn,
)
from appliance.server.openai import turns
from appliance.server.openai_responses import turns as responses_turns
from appliance.server.openai_responses.history import InputReader, ResponseStore
from appliance.server.openai_responses.responding import OutputItems
from appliance.server.openai_responses.schema import InputPart, Item, ResponsesRequest
from appliance.server.requests.prompt import prompt_text
from appliance.server.requests.sampling import sampling_params
from appliance.server.requests.schema import (
    CalledFunction,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    Message,
    ToolCall,
)
from appliance.server.retrieval.embedding import with_prompt
from appliance.server.retrieval.relevance import encoded_pairs
from appliance.server.retrieval.routes import pairs_of
from appliance.server.retrieval.schema import ScoreRequest
from appliance.server.retrieval.vectors import embeddings_of
from appliance.text import ChoiceText
from appliance.tokenizer import ChatTemplate, StopStringMatcher, Tokenizer

DOORS = Doors()
door = DOORS.door

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}<|im_start|>assistant\n"
)

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
        _JSON, st.sampled_from(["messages", "prompt", "logit_bias", "stop", "tools", "x"]), NAMES
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
    if kind == "few":  # duplicate keys
        raw = b'{"' + b'":1,"'.join(str(i).encode() for i in range(size)) + b'":1}'

    def decode() -> None:
        for struct in (ChatRequest, CompletionRequest, ResponsesRequest, CountRequest):
            lenient(lambda struct=struct: decode_json(raw, struct))()  # type: ignore[misc]

    return decode


@door(st.tuples(st.lists(st.sampled_from(["", "a", 1]), min_size=1, max_size=3)), 500, (["a"],))
def token_and_text_lists(shape: Any, size: int) -> Callable[[], object]:
    prompts = list(islice(cycle(shape[0]), size))
    return lenient(lambda: prompt_text(prompts, _TOKENIZERS[0]))


@door(st.tuples(NAMES, st.sampled_from([0, 7, 10**6]), st.booleans()), 300)
def sampling_lists(shape: Any, size: int) -> Callable[[], object]:
    kind, largest, keys = shape
    ids = [number % (largest + 1) for number in range(size)]
    body = CompletionRequest(
        prompt="a",
        logit_bias={str(number) if keys else str(name): 1.0 for number, name in zip(
            range(size), names("distinct", size), strict=True)},
        stop=[str(name) for name in names(kind, size)],
        stop_token_ids=ids,
    )  # fmt: skip
    info: Any = SimpleNamespace(vocab_size=10**6, context_length=10**6)
    defaults = SamplingDefaults()
    return lenient(lambda: sampling_params(body, info, defaults, max_tokens=9, logprobs=None))


@door(st.tuples(UNITS, st.booleans(), st.booleans()), 60)
def embeddings_and_pairs(shape: Any, size: int) -> Callable[[], object]:
    units, one_first, one_long = shape
    texts = [repeated(units, 12)] * size if not one_long else [repeated(units, 12 * size)]
    recipe = EmbeddingRecipe(prompts={"query": "q: "})
    body = ScoreRequest(text_1=texts[:1] if one_first else texts, text_2=texts)
    reranker = RerankRecipe(source="", template="{instruction}{query}{document}", labels=("a",))
    rows = np.arange(4 * size, dtype=np.float32).reshape(size, 4)

    def begin() -> None:
        given = with_prompt([*texts], recipe, "query")
        prompt_text([*given], _TOKENIZERS[0])
        encoded_pairs(_TOKENIZERS[0], reranker, "Judge.", pairs_of(body)[0])
        embeddings_of(rows, base64=True)
        embeddings_of(rows, base64=False)

    return lenient(begin)


_HEADS = (
    "headers", "cookie", "authorization", "accept", "accept-encoding", "content-type", "host",
    "origin", "x-request-id", "x-forwarded-for", "idempotency-key", "query", "path",
)  # fmt: skip


@door(st.tuples(st.sampled_from(_HEADS), UNITS, NAMES), 400, ("query", ["a=", "&b%41;"], "few"))
def heads(shape: Any, size: int) -> Callable[[], object]:
    """Headers, query strings and names in paths, at routes with a name, a page and a body."""
    part, units, kind = shape
    text = halves(units, size)

    async def ask(call: Call) -> None:
        more = {} if part in ("headers", "query", "path") else {part: text}
        client = Client(call, {"authorization": "Bearer a-secret-key-1", **more})
        scope: dict[str, Any] = client.scope
        if part == "headers":
            scope["headers"] += [(str(name).encode(), b"a") for name in names(kind, size)]
        if part == "query":
            scope["query_string"] = text.encode()
        if part == "path":
            scope["path"] += text
            scope["raw_path"] = quote(scope["path"]).encode()
        client.gone.set()
        with contextlib.suppress(Exception):  # it fails without an engine
            await _APPS[0](scope, client.receive, client.send)

    def ask_each() -> None:
        loop = asyncio.new_event_loop()
        for path in ("/v1/models/", "/v1/responses/", "/api/blobs/", "/static/", "/metrics"):
            loop.run_until_complete(ask(Call("GET", path)))
        loop.run_until_complete(ask(Call("POST", "/v1/completions", {"prompt": "a"})))
        loop.close()

    return ask_each


# ---- messages of each protocol ----


@door(st.tuples(NAMES, NAMES, st.booleans()), 60, ("distinct", "distinct", True))
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


@door(st.tuples(NAMES, NAMES, st.booleans()), 60, ("distinct", "distinct", True))
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


@door(
    st.tuples(NAMES, NAMES, st.sampled_from(["text", "thinking", "tool_use"])),
    60,
    ("distinct", "distinct", "tool_use"),
)
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


@door(
    st.tuples(_ITEMS, NAMES),
    80,
    (["function_call", "function_call_output"], "distinct"),
    (["reasoning"], "distinct"),
)
def responses_items(shape: Any, size: int) -> Callable[[], object]:
    items = [item for item in _items(shape[0], shape[1], size) if item.type != "item_reference"]
    return lenient(lambda: responses_turns.turns_of("Be brief.", [], items))


@door(st.tuples(_ITEMS, NAMES), 40, (["reasoning", "item_reference"], "distinct"))
def response_store(shape: Any, size: int) -> Callable[[], object]:
    """Keep, continue and rename a conversation, also with references to its items."""
    kinds, kind = shape
    new = [one for one in kinds if one != "item_reference"] or ["reasoning"]

    def chain() -> None:
        store = ResponseStore()
        for number in range(3):
            body = ResponsesRequest(
                input=_items(kinds if number else new, kind, size),
                previous_response_id=f"r{number - 1}" if number else None,
            )
            history = InputReader(store, "ann", body, max_bytes=10**6).read()
            store.keep("ann", f"r{number}", history.kept_with(b"{}", b"[]", ()))

    return lenient(chain)


# ---- templates and tokenizers ----

_TEXTS = st.lists(
    st.sampled_from(["a", "<|im_end|>", "<|im", "\n", "<", "Z1Z", "\u20ac ", "word "]),
    min_size=1,
    max_size=3,
)


@door(
    st.tuples(_TEXTS, st.booleans(), st.booleans()), 30, (["<|im_end|>", "word " * 20], False, True)
)
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


@door(st.tuples(_STOPS, UNITS, st.integers(1, 9)), 200, (["a"], ["a"], 1))
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
            if text.push((token_id,), None)[1] is not None:
                return
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
    # Unfinished calls, character by character and at once: in a string, in the name, in a list.
    text, name, _ = form.write("f", '{"a": "b"}').partition('"f"')
    begun = (text + name).rpartition("f")[0]
    endless = (
        ([form.write("f", '{"a": "b"}').partition("b")[0], "word "], 1, True, None, False),
        ([begun, "word "], 1, True, None, False),
        ([form.write("f", '{"a": ["b"]}').partition("]")[0], ', "c"'], 7, True, None, False),
    )
    door(shapes, 150, *(endless if form in (learn.FORMS[0], learn.FORMS[9]) else ()))(read)


for _form in learn.FORMS:
    _reader_door(_form)

_PIECES: st.SearchStrategy[list[Part]] = st.lists(
    st.sampled_from(
        [Content("a"), Thought("b"), CallBegin("f"), CallArguments('{"a": 1}'), Content(" ")]
    ),
    min_size=1,
    max_size=4,
)


@door(_PIECES, 200, [Content("word " * 40)], [Thought("word " * 40)])
def parts_of_an_answer(shape: Any, size: int) -> Callable[[], object]:
    parts: list[Part] = [CallBegin("f"), *islice(cycle(shape), size)]

    def build() -> None:
        messages.answer_blocks(parts)
        for kinds in ({}, {"f": "custom"}):
            output = OutputItems({}, kinds, short_ids=False, carries=True)
            for part in parts:
                output.push(part)
            output.close("incomplete")

    return build


_TOKENIZERS: list[Tokenizer] = []
_APPS: list[FastAPI] = []


@pytest.fixture(scope="module", autouse=True)
def _tokenizer(tokenizer_folder: Path) -> None:
    made = Tokenizer.from_path(tokenizer_folder)
    made.chat_template = ChatTemplate(CHATML, {})
    _TOKENIZERS[:] = [made]
    _APPS[:] = [create_app(ServerState(ServerConfig(api_key="a-secret-key-1")))]


@pytest.mark.parametrize("name", DOORS)
def test_costs_grow_as_the_input_does(name: str) -> None:
    DOORS.check(name)
