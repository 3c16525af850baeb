"""Asks a server for its state, and times its answers."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

    from appliance.tui.server import Server

SAMPLE_PROMPT = "Once upon a time"
SAMPLE_TOKENS = 32
_PATIENCE = 10.0  # seconds for an answer without computation
_SAMPLE_PATIENCE = 120.0


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Facts that a server reports.

    Attributes:
        problem: why there is no answer; None if there is one.
        works: it would compute an answer now.
        status: of a request with the key.
        context_length: of the first model, in tokens; None if unknown.
        ranks: in words, of models that several processes divide.
        unused_gpu: why a GPU of the server's machine computes nothing; empty without one.
        version: of the server; None if unknown.
    """

    problem: str | None = None
    is_ours: bool = False
    health: str = ""
    works: bool = False
    status: int = 0
    models: tuple[str, ...] = ()
    context_length: int | None = None
    ranks: tuple[str, ...] = ()
    unused_gpu: str = ""
    version: str | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """Timings of a sample: seconds to the first token, and tokens per second after it."""

    first_token: float
    tokens_per_second: float
    num_tokens: int

    def __str__(self) -> str:
        rate = f"then {self.tokens_per_second:,.1f} tokens/s"
        return f"first token after {self.first_token * 1000:,.0f} ms, {rate} ({self.num_tokens})"


async def ask_server(server: Server) -> ServerFacts:
    """Ask for health, models and version; a missing answer is a fact, too."""
    import httpx

    async with server.client(_PATIENCE) as client:
        try:
            health = await client.get(server.path("/health"))
            models = await client.get(server.path("/v1/models"))
            page = await client.get(server.path("/openapi.json"))
        except httpx.HTTPError as error:
            return ServerFacts(problem=str(error) or type(error).__name__)
    body, title = _object(health), _object(page).get("info", {})
    divided = body.get("ranks")
    served = [one for one in _object(models).get("data", ()) if isinstance(one, dict)]
    is_ours = "x-request-id" in health.headers and bool(body.keys() & {"status", "error"})
    return ServerFacts(
        is_ours=is_ours,
        health=str(body.get("status") or body.get("error", {}).get("message", health.status_code)),
        works=health.status_code == 200,
        status=models.status_code,
        models=tuple(str(one.get("id")) for one in served),
        context_length=served[0].get("max_model_len") if served else None,
        ranks=tuple(
            f"{model}, rank {place}: {words}"
            for model, ranks in (divided.items() if isinstance(divided, dict) else ())
            for place, words in enumerate(ranks)
        ),
        unused_gpu=str(body.get("unused_gpu", "")),
        version=title.get("version") if title.get("title") == "Appliance" else None,
    )


async def time_sample(server: Server, model: str) -> Timings | str:
    """Time a completion by a server's model; of one that only reads, say what it gives instead.

    Raises:
        httpx.HTTPError: no answer, or not within two minutes.
        ValueError: the answer holds no text; the message is the server's.
    """
    body = {
        "model": model,
        "prompt": SAMPLE_PROMPT,
        "max_tokens": SAMPLE_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    stamps: list[float] = []
    num_tokens = 0
    async with server.client(_SAMPLE_PATIENCE) as client:
        start = time.monotonic()
        async with client.stream("POST", server.path("/v1/completions"), json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                if answer.status_code == 400 and (
                    given := await _time_reading(client, server, model)
                ):
                    return given
                raise ValueError(_object(answer).get("error", {}).get("message", answer.text[:200]))
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise ValueError(str(event["error"].get("message")))
                if event.get("choices"):
                    stamps.append(time.monotonic())
                num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
    if not stamps or not num_tokens:
        raise ValueError("the answer is empty")
    span = stamps[-1] - stamps[0]
    rate = (num_tokens - 1) / span if span > 0 else 0.0
    return Timings(stamps[0] - start, rate, num_tokens)


async def _time_reading(client: httpx.AsyncClient, server: Server, model: str) -> str:
    """Time a vector or a score by a model that writes nothing; empty if it gives neither."""
    for path, what, texts in (
        ("/v1/embeddings", "a vector", {"input": SAMPLE_PROMPT}),
        ("/v1/rerank", "a score", {"query": SAMPLE_PROMPT, "documents": [SAMPLE_PROMPT]}),
    ):
        start = time.monotonic()
        answer = await client.post(server.path(path), json={"model": model, **texts})
        if answer.status_code == 200:
            return f"it only reads texts; {what} after {1000 * (time.monotonic() - start):,.0f} ms"
    return ""


def _object(answer: httpx.Response) -> dict[str, Any]:
    try:
        found = answer.json()
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
