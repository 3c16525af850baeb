"""Structured output over HTTP: refusals before the engine sees the request, and real answers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from support.runs.waiting import until

from appliance.engine.process.launch import ENGINE_COMMAND
from appliance.engine.process.supervisor import SupervisionLimits
from appliance.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from tests.server.conftest import Running, Serve

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "people": {"type": "integer", "minimum": 0},
        "sights": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
    },
    "required": ["city", "people", "sights"],
    "additionalProperties": False,
}
NESTED: dict[str, Any] = {}
for _ in range(70):
    NESTED = {"items": NESTED}


def schema_format(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}


MANY: dict[str, Any] = {"properties": {f"p{number}": {} for number in range(1001)}}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {}}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": schema_format("{}")}, "response_format"),
    ({"response_format": schema_format(NESTED)}, "response_format.json_schema.schema"),
    (
        {"response_format": schema_format({"properties": {"a": {"type": "strin"}}})},
        "response_format.json_schema.schema.properties.a.type",
    ),
    (
        {"response_format": schema_format({"items": {"uniqueItems": True}}, strict=False)},
        "response_format.json_schema.schema.items.uniqueItems",
    ),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {"enum": []}}}, "structured_outputs.json.enum"),
    ({"structured_outputs": {"json": {"$ref": "file:///x"}}}, "structured_outputs.json.$ref"),
    ({"structured_outputs": {"json": {"description": "x" * 300_000}}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "(" * 60_000}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a"] * 2000}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": "start: nowhere"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": "start: <nope>"}}, "structured_outputs.grammar"),
    ({"guided_grammar": 'start: "a" <[99999999]>'}, "guided_grammar"),
    ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": "root ::= nowhere"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs.regex",
    ),
    ({"guided_json": {"not": {"type": "integer"}}}, "guided_json.not"),
    ({"guided_json": {"not": {}}}, "guided_json.not"),
    ({"guided_json": {"$ref": "#"}}, "guided_json.$ref"),
    ({"guided_json": {"items": {"const": 2**53 + 1}}}, "guided_json.items.const"),
    ({"guided_json": MANY}, "guided_json.properties"),
    ({"guided_json": '{"const": NaN}'}, "guided_json"),
    ({"guided_json": '{"maximum": 1e999}'}, "guided_json"),
    ({"guided_json": '{"const": "\\ud800"}'}, "guided_json"),
    ({"guided_regex": "["}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_grammar": "?"}, "guided_grammar"),
    ({"guided_regex": "a", "use_beam_search": True, "best_of": 2}, "use_beam_search"),
    ({"json_schema": {"not": {}}}, "json_schema.not"),
    ({"grammar": "root ::= ("}, "grammar"),
    ({"json_schema": {}, "grammar": 'root ::= "a"'}, "grammar"),
    (
        {"response_format": {"type": "json_object", "schema": {"not": {}}}},
        "response_format.schema.not",
    ),
    ({"response_format": {"type": "json_schema", "schema": 1}}, "response_format"),
]  # fmt: skip


async def test_what_cannot_be_is_refused_with_its_place(serve: Serve) -> None:
    async with serve() as running:
        for fields, param in BAD:
            response = await running.chat(**fields)
            assert response.status_code == 400, (fields, response.text)
            error = response.json()["error"]
            assert error["param"] == param, (fields, error)
            assert error["type"] == "invalid_request_error"
            assert len(error["message"]) < 1000
        scored = {"echo": True, "logprobs": 1, "guided_regex": "a"}
        response = await running.complete("a", **scored)
        assert response.json()["error"]["param"] == "guided_regex"
        assert running.engine.stats.steps_total == 0, "none of it reached the engine"


async def test_what_asks_for_nothing_is_let_through(serve: Serve) -> None:
    async with serve() as running:
        nothing: tuple[dict[str, Any], ...] = (
            {"response_format": {"type": "text"}},
            {"response_format": None},
            {"grammar": "", "json_schema": None},
            {"guided_grammar": "", "guided_json": None},  # SillyTavern's, of vLLM
            {"guided_regex": "", "guided_json": "", "json_schema": ""},
            {"structured_outputs": {"grammar": "", "regex": ""}},
            {"structured_outputs": {}},
            {"structured_outputs": {"json_object": False}},
        )
        for fields in nothing:
            assert (await running.chat(max_tokens=1, **fields)).status_code == 200, fields
        assert running.engine.vocabulary is None


async def test_a_grammar_that_takes_too_long_ends_its_process_alone(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("appliance.server.models.grammar_checks.CPU_SECONDS", 0.001)
    async with serve() as running:
        body: dict[str, Any] = {"structured_outputs": {"regex": "(a)" * 60_000}}
        error = (await running.chat(**body)).json()["error"]
        assert error["param"] == "structured_outputs.regex"
        assert "simpler" in error["message"]
        monkeypatch.undo()
        assert (await running.chat(max_tokens=1, guided_regex="a")).status_code == 200


async def check_metrics(running: Running) -> None:
    await until(lambda: running.engine.stats.grammar_requests_total == 7)
    lines = (await running.http.get("/metrics")).text.splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if "_grammar_" in line and line[0] != "#")
    label = '{model_name="echo"}'
    assert float(found[f"appliance_grammar_requests_total{label}"]) == 7
    assert float(found[f"appliance_grammar_cache_hits_total{label}"]) == 1
    assert float(found[f"appliance_grammar_compile_seconds_count{label}"]) == 6
    assert float(found[f"appliance_grammar_compile_seconds_sum{label}"]) > 0


@pytest.mark.model
async def test_the_default_model_answers_in_form(serve: Serve, smollm2_gguf: Path) -> None:
    async with serve(
        str(smollm2_gguf),
        command=ENGINE_COMMAND,
        tokenizer=Tokenizer.from_path(smollm2_gguf),
        limits=SupervisionLimits(),
        device="cpu",
        threads=2,
        max_model_len=1024,
        kv_cache_memory=2**27,
    ) as running:
        question = "Describe Paris as JSON with city, people and sights."
        common: dict[str, Any] = {"max_tokens": 200, "seed": 1, "temperature": 0.7}
        form = schema_format(SCHEMA, strict=True)
        answer = (await running.chat(question, response_format=form, n=2, **common)).json()
        for choice in answer["choices"]:
            assert choice["finish_reason"] == "stop"
            jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
        fields = {"messages": [{"role": "user", "content": question}], **common}
        frames = await running.frames(CHAT, response_format=form, **fields)
        deltas = [json.loads(frame)["choices"][0]["delta"] for frame in frames[:-1]]
        text = "".join(delta.get("content", "") for delta in deltas)
        assert text == answer["choices"][0]["message"]["content"]
        object_answer = await running.chat(
            question, response_format={"type": "json_object"}, stop=["}"], **common
        )
        assert object_answer.json()["choices"][0]["message"]["content"].startswith("{")
        for outputs, allowed in (
            ({"choice": ["red", "green"]}, {"red", "green"}),
            ({"regex": "[0-9]{3}"}, {str(n).zfill(3) for n in range(1000)}),
            ({"grammar": 'root ::= "a" | "b"'}, {"a", "b"}),
            ({"grammar": 'start: "a" | "b"'}, {"a", "b"}),
        ):
            response = await running.complete("x", structured_outputs=outputs, **common)
            assert response.json()["choices"][0]["text"] in allowed
        await check_metrics(running)
        for fields, said in (  # in the spelling of llama.cpp's server
            ({"grammar": 'root ::= "a"'}, "a"),
            ({"json_schema": {"const": 7}}, "7"),
            ({"response_format": {"type": "json_object", "schema": {"const": 7}}}, "7"),
            ({"response_format": {"type": "json_schema", "schema": {"const": 7}}}, "7"),
        ):
            for response in (
                await running.complete("x", **fields, **common),
                await running.chat("x", **fields, **common),
            ):
                (choice,) = response.json()["choices"]
                assert (choice.get("text") or choice["message"]["content"]) == said
        unknown = {"grammar": "start: <nowhere>"}
        for stream in (False, True):
            refused = await running.chat(structured_outputs=unknown, stream=stream)
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert error["param"] == "structured_outputs.grammar"
            assert "line 1, column 8: this model has no control token <nowhere>" in error["message"]
