"""Every protocol accepts the schemas that pydantic and zod write, or refuses them by name."""

from __future__ import annotations

import json
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from ipaddress import IPv4Address, IPv4Network, IPv6Address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from uuid import UUID

import jsonschema
from annotated_types import Ge, Gt, Interval, Len, MultipleOf
from pydantic import (
    UUID4,
    AnyUrl,
    Base64Bytes,
    BaseModel,
    ByteSize,
    ConfigDict,
    Discriminator,
    Field,
    FilePath,
    HttpUrl,
    Json,
    NegativeInt,
    PositiveFloat,
    PostgresDsn,
    SecretStr,
    StringConstraints,
    create_model,
)

if TYPE_CHECKING:
    from tests.server.conftest import Running, Serve


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["dog", "hound"]
    name: str | None = None


class Tree(BaseModel):
    name: str
    children: list[Tree] = Field(default_factory=list, max_length=2)


TYPES: dict[str, Any] = {
    "paths": (Path, FilePath),
    "secrets": (SecretStr, bytes, Base64Bytes, Json[int]),
    "ids": (UUID, UUID4),
    "addresses": (AnyUrl, HttpUrl, PostgresDsn, IPv4Address, IPv6Address, IPv4Network),
    "numbers": (Decimal, NegativeInt, PositiveFloat, ByteSize, complex | int),
    "bounds": (
        Annotated[int, Interval(ge=0, lt=2**53)],
        Annotated[float, Gt(0.5)],
        Annotated[int, MultipleOf(5)],
        Annotated[Decimal, Ge(1)],
    ),
    "times": (datetime, date, time, timedelta),
    "containers": (
        dict[str, int],
        dict[int, str],
        dict[Colour, int],
        list[Colour],
        tuple[int, str],
        tuple[int, ...],
        Annotated[list[str], Len(1, 3)],
    ),
    "choices": (Literal["a", 1, None, True], Colour, int | str | None, bool | None),
    "models": (Annotated[Cat | Dog, Discriminator("kind")], Cat | Dog, Tree, dict[str, Cat]),
    "patterns": (
        Annotated[str, StringConstraints(pattern="^[a-z]+$", min_length=2, max_length=5)],
        Annotated[dict[Annotated[str, StringConstraints(pattern="^x-")], int], Len(max_length=2)],
    ),
    "notes": (
        Annotated[str, Field(title="T", description="D", examples=["e"], deprecated=True)],
        Annotated[int, Field(default=3, json_schema_extra={"x-order": 1, "readOnly": True})],
    ),
    "small sets": (set[Colour], frozenset[bool], set[Literal["a", "b", "c"]]),
}


def schema_of(*types: Any) -> Any:
    """The schema of a model with a field of each type."""
    fields: Any = {f"f{number}": (one, ...) for number, one in enumerate(types)}
    return create_model("Model", **fields).model_json_schema()


MODELS = {name: schema_of(*types) for name, types in TYPES.items()}
ZOD = json.loads(
    Path(__file__).with_name("zod_schemas.json").read_text()
)  # z.toJSONSchema of 4.6.7
# zod's expression for a duration has a lookahead in its middle.
REFUSED = {"strings, output": "l.pattern", "strings, input": "l.pattern"}
ACCEPTED = {**MODELS, **{name: schema for name, schema in ZOD.items() if name not in REFUSED}}
LARGE_SET = schema_of(set[str])

HI = [{"role": "user", "content": "hi"}]
Body = dict[str, Any]


def function(schema: Any, **more: Any) -> Body:
    return {"name": "f", "description": "d", "parameters": schema, **more}


def bodies(schema: Any) -> dict[str, tuple[str, Body]]:
    """A path and body of each protocol, by the place of the schema in it."""
    named = {"name": "x", "schema": schema, "strict": True}
    tool = {"type": "function", "function": function(schema, strict=True)}
    flat = {"type": "function", **function(schema, strict=True)}
    anthropic = {"name": "f", "input_schema": schema}
    chat, few = "/v1/chat/completions", {"max_tokens": 1}
    return {
        "response_format.json_schema.schema": (
            chat,
            {"response_format": {"type": "json_schema", "json_schema": named}, "messages": HI},
        ),
        "guided_json": (chat, {"guided_json": schema, "messages": HI}),
        "tools[0].function.parameters": (chat, {"tools": [tool], "messages": HI}),
        "text.format.schema": (
            "/v1/responses",
            {"input": "hi", "text": {"format": {"type": "json_schema", **named}}},
        ),
        "tools[0].parameters": ("/v1/responses", {"input": "hi", "tools": [flat]}),
        "tools.0.input_schema": (
            "/v1/messages",
            {"messages": HI, "tools": [anthropic], "tool_choice": {"type": "any"}, **few},
        ),
        "format": ("/api/chat", {"messages": HI, "format": schema, "stream": False}),
    }


async def post(running: Running, path: str, body: Body) -> tuple[int, str, str]:
    """The status, the message and the field of an answer."""
    given = {"model": "echo", **body}
    if path == "/v1/chat/completions":
        given["max_tokens"] = 1
    response = await running.http.post(path, json=given)
    error = {} if response.status_code == 200 else response.json()["error"]
    if isinstance(error, str):
        return response.status_code, error, error.partition(":")[0]
    said = error.get("message", "")
    return response.status_code, said, error.get("param") or said.partition(":")[0]


async def test_every_protocol_accepts_it(serve: Serve) -> None:
    async with serve("num_blocks=2048", max_model_len=16384) as running:
        for name, schema in ACCEPTED.items():
            jsonschema.Draft202012Validator.check_schema(schema)
            for place, (path, body) in bodies(schema).items():
                status, said, _ = await post(running, path, body)
                assert status == 200, (name, place, said)


async def test_every_protocol_names_what_it_refuses(serve: Serve) -> None:
    async with serve("num_blocks=2048", max_model_len=16384) as running:
        for schema, inner in (
            (LARGE_SET, "properties.f0.uniqueItems"),
            (ZOD["strings, output"], "properties.l.pattern"),
            (
                {"type": "object", "properties": {"a": {"not": {"pattern": "a"}}}},
                "properties.a.not",
            ),
        ):
            for place, (path, body) in bodies(schema).items():
                status, said, param = await post(running, path, body)
                assert status == 400, (place, said)
                assert param == f"{place}.{inner}", said
