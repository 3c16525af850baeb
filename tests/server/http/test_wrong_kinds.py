"""Every field of every route in the OpenAPI document, with every kind of value: never a 500."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from support.runs.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.server.conftest import Serve

# JSON texts; no encoder writes some of them.
KINDS = (
    "null", "true", "0", "-1", "1.5", "1e400", "1e-400", "NaN", "-Infinity", "9" * 25, "9" * 5000,
    '""', '"x"', '"\\u0000"', '"\\ud800"', '"\\udc00x"', "[]", "[null]", "[[]]", "[1e400]",
    '["\\ud800"]', "{}", '{"":null}', '{"a":{"b":[1]}}', '[{"type":"x"}]', '{"type":"x"}',
    '[{"type":"text","text":5}]', '{"$ref":"#"}', "[" * 200 + "]" * 200,
    '{"a":' * 90 + "1" + "}" * 90,
)  # fmt: skip
HI = [{"role": "user", "content": "hi"}]
# The fields that a body needs besides the one under test.
NEEDED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 1},
    "/v1/completions": {"prompt": "hi", "max_tokens": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
    "/v1/messages": {"messages": HI, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": HI},
    "/api/chat": {"messages": HI, "stream": False, "options": {"num_predict": 1}},
    "/api/generate": {"prompt": "hi", "stream": False, "options": {"num_predict": 1}},
    "/v1/embeddings": {"input": "hi"},
    "/api/embed": {"input": "hi"},
    "/api/embeddings": {"prompt": "hi"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
    "/api/show": {},
}
SENDS_ON = {"/admin/v1/events"}  # an endless stream


def resolved(document: Any, schema: Any) -> Any:
    while "$ref" in schema:
        found = document
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        schema = found
    return schema


def fields(document: Any, schema: Any, depth: int = 2) -> Iterator[tuple[str, ...]]:
    """Paths of the fields of a body, and of those one level deeper."""
    schema = resolved(document, schema)
    for option in schema.get("anyOf", []):
        yield from fields(document, option, depth)
    for name, inner in schema.get("properties", {}).items():
        yield (name,)
        if depth > 1:
            yield from ((name, *rest) for rest in fields(document, inner, depth - 1))


def with_field(body: dict[str, Any], path: tuple[str, ...], kind: str) -> str:
    """The body as text, with a value at a path."""
    first, *rest = path
    value = f"{{{json.dumps(rest[0])}:{kind}}}" if rest else kind
    others = {key: one for key, one in body.items() if key != first}
    text = json.dumps({"model": "echo", **others} if first != "model" else others)
    return f"{text[:-1]}{',' if len(text) > 2 else ''}{json.dumps(first)}:{value}}}"


async def test_no_kind_of_value_is_the_servers_fault(serve: Serve) -> None:
    async with serve(server={"max_queue": 64}) as running:
        document = (await running.http.get("/openapi.json")).json()
        tried = 0
        for path, operations in document["paths"].items():
            content = operations.get("post", {}).get("requestBody", {}).get("content", {})
            if "application/json" not in content or "{" in path:
                continue
            schema = content["application/json"]["schema"]
            body = NEEDED.get(path, {})
            for number, field in enumerate(dict.fromkeys(fields(document, schema))):
                # Each field gets a share of the kinds, and the next field gets the next share.
                share = 6 if len(field) == 1 else 15
                for kind in KINDS[number % share :: share]:
                    text = with_field(body, field, kind)
                    response = await running.http.post(
                        path, content=text, headers={"content-type": "application/json"}
                    )
                    assert response.status_code < 500, (path, text[:300], response.text[:300])
                    tried += 1
        assert tried > 700
        await until(running.idle)
        assert (await running.complete("x", max_tokens=1)).status_code == 200


async def test_no_query_is_the_servers_fault(serve: Serve) -> None:
    values = (
        "",
        "0",
        "-1",
        "1.5",
        "x",
        "9" * 5000,
        "0001" + "0" * 5000,
        "%00",
        "%ff",
        "é",
        "null",
        "[]",
    )
    async with serve() as running:
        document = (await running.http.get("/openapi.json")).json()
        made = await running.http.post("/v1/responses", json={"input": "hi"})
        ids = {"response_id": made.json()["id"], "model_id": "echo"}
        for path, operations in document["paths"].items():
            if "get" not in operations or path in SENDS_ON:
                continue
            names = [
                one["name"]
                for one in operations["get"].get("parameters", [])
                if one["in"] == "query"
            ]
            for name in [*names, "limit", "after", "order", "unknown"]:
                for value in values:
                    where = path.format_map({**ids, **dict.fromkeys(named(path) - ids.keys(), "1")})
                    response = await running.http.get(f"{where}?{name}={value}")
                    assert response.status_code < 500, (where, name, value[:20], response.text)
        for value in values[1:]:
            for path in ("/v1/responses/", "/v1/models/", "/admin/v1/requests/"):
                response = await running.http.get(path + value)
                assert response.status_code < 500, (path, value[:20])


def named(path: str) -> set[str]:
    return {part.partition("}")[0] for part in path.split("{")[1:]}
