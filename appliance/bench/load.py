"""Loads OpenAI-compatible endpoints and times each client's reply.

On few cores, client and server compete. So a burst only timestamps the replies' bytes, and parses
HTTP, events and JSON afterwards.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from appliance.bench.figures import percentile
from appliance.errors import ApplianceError

if TYPE_CHECKING:
    import ssl

    from prometheus_client.samples import Sample

TIMEOUT_SECONDS = 600.0


class LoadError(ApplianceError):
    """The endpoint answered with an error or the wrong length."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address and key of a server.

    Attributes:
        tls: True for HTTPS; a context selects the trusted certificates.
    """

    host: str
    port: int
    tls: bool | ssl.SSLContext = False
    api_key: str | None = None

    @classmethod
    def of_url(
        cls, url: str, api_key: str | None = None, trusted: bool | ssl.SSLContext = True
    ) -> Endpoint:
        """Parse http://HOST:PORT or https://HOST."""
        parts = urlsplit(url)
        tls = parts.scheme == "https" and trusted
        return cls(parts.hostname or "127.0.0.1", parts.port or (443 if tls else 80), tls, api_key)


@dataclass
class TimedAnswer:
    """One request as its client saw it, in seconds; a chunk is an event with text."""

    begin: float = 0.0  # send time, by `time.perf_counter`
    first_token: float = 0.0
    gaps: list[float] = field(default_factory=list)
    total: float = 0.0
    completion_tokens: int = 0
    prompt_tokens: int = 0
    chunks: int = 0
    text: str = ""


@dataclass(frozen=True, slots=True)
class Burst:
    """Requests that ran together."""

    seconds: float
    cpu_seconds: float
    answers: list[TimedAnswer]

    @property
    def rate(self) -> float:
        """Output tokens per second of all clients."""
        return sum(answer.completion_tokens for answer in self.answers) / self.seconds


def completion_body(
    prompt: str | list[int], max_tokens: int, model: str | None = None
) -> dict[str, Any]:
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return body if model is None else {"model": model, **body}


async def run_burst(endpoint: Endpoint, clients: list[list[dict[str, Any]]]) -> Burst:
    """Run all clients at once; each sends its requests to /v1/completions in turn.

    Raises:
        LoadError: an answer is an error or has the wrong number of tokens.
    """

    async def one_client(bodies: list[dict[str, Any]]) -> list[_Transcript]:
        return [await _exchange(endpoint, "POST", "/v1/completions", body) for body in bodies]

    begin, cpu_begin = time.perf_counter(), time.process_time()
    groups = await asyncio.gather(*(one_client(bodies) for bodies in clients))
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
    answers = [
        _answer(transcript, body["max_tokens"])
        for bodies, group in zip(clients, groups, strict=True)
        for body, transcript in zip(bodies, group, strict=True)
    ]
    return Burst(seconds, cpu_seconds, answers)


async def fetch(endpoint: Endpoint, path: str) -> tuple[int, bytes]:
    """Return status and body of a GET; raises OSError without a connection."""
    transcript = await _exchange(endpoint, "GET", path, None)
    return transcript.status(), b"".join(data for _, data in transcript.body())


async def read_metrics(endpoint: Endpoint, *names: str) -> list[Sample]:
    """Return samples of /metrics, all or those with these prefixes; none without such a page.

    Parsing a whole page takes milliseconds and disturbs a server on the same machine.

    Raises:
        OSError: the connection failed.
    """
    from prometheus_client.parser import text_string_to_metric_families

    status, page = await fetch(endpoint, "/metrics")
    if status != 200:
        return []
    text = page.decode()
    if names:
        text = "".join(line for line in text.splitlines(keepends=True) if line.startswith(names))
    families = text_string_to_metric_families(text)
    return [sample for family in families for sample in family.samples]


def latency(seconds: list[float]) -> dict[str, float]:
    """Return median and 99th percentile in milliseconds."""
    return {
        "p50": round(1000 * percentile(seconds, 0.50), 1),
        "p99": round(1000 * percentile(seconds, 0.99), 1),
    }


class _Transcript(asyncio.Protocol):
    """The bytes of one exchange with their arrival times."""

    def __init__(self, request: bytes) -> None:
        self.begin = time.perf_counter()
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._times: list[float] = []
        self._pieces: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._times.append(time.perf_counter())
        self._pieces.append(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self.over.done():
            return
        if error is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(error)

    def status(self) -> int:
        match = re.match(rb"HTTP/1\.\d (\d{3})", b"".join(self._pieces[:2]))
        if match is None:
            raise LoadError("the connection was closed without an answer")
        return int(match[1])

    def seconds(self) -> float:
        return self._times[-1] - self.begin

    def body(self) -> Iterator[tuple[float, bytes]]:
        """Yield the body's pieces with their completion times."""
        raw = b"".join(self._pieces)
        ends = list(accumulate(map(len, self._pieces)))
        head, _, _ = raw.partition(b"\r\n\r\n")
        position = len(head) + 4
        if not re.search(rb"(?i)\r\ntransfer-encoding: *chunked", head):
            for line in re.finditer(rb"[^\n]*\n|[^\n]+$", raw[position:]):
                yield self._times[bisect_left(ends, position + line.end())], line[0]
            return
        while size := int(raw[position : raw.index(b"\r\n", position)].split(b";")[0], 16):
            start = raw.index(b"\r\n", position) + 2
            yield self._times[bisect_left(ends, start + size)], raw[start : start + size]
            position = start + size + 2

    def events(self) -> Iterator[tuple[float, bytes]]:
        """Yield the content of each `data:` line with its time."""
        rest = b""
        for moment, data in self.body():
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    yield moment, line[5:].strip()


async def _exchange(
    endpoint: Endpoint, method: str, path: str, body: dict[str, Any] | None
) -> _Transcript:
    content = b"" if body is None else json.dumps(body).encode()
    key = f"Authorization: Bearer {endpoint.api_key}\r\n" if endpoint.api_key else ""
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: {endpoint.host}:{endpoint.port}\r\n{key}"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        "Connection: close\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(TIMEOUT_SECONDS):
        transport, transcript = await loop.create_connection(
            lambda: _Transcript(head.encode() + content),
            endpoint.host,
            endpoint.port,
            ssl=endpoint.tls or None,
        )
        try:
            await transcript.over
        finally:
            transport.close()
    return transcript


def _answer(transcript: _Transcript, max_tokens: int) -> TimedAnswer:
    if (status := transcript.status()) != 200:
        body = b"".join(data for _, data in transcript.body())
        raise LoadError(f"{status}: {body[:500]!r}")
    answer = TimedAnswer(begin=transcript.begin, total=transcript.seconds())
    last = transcript.begin
    for moment, data in transcript.events():
        if data == b"[DONE]":
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            raise LoadError(f"error in the stream: {chunk['error']}")
        if usage := chunk.get("usage"):
            answer.prompt_tokens = usage["prompt_tokens"]
            answer.completion_tokens = usage["completion_tokens"]
        for choice in chunk["choices"]:
            text = choice.get("text") or ""
            if choice.get("finish_reason") and not text:
                continue
            answer.text += text
            if answer.chunks:
                answer.gaps.append(moment - last)
            else:
                answer.first_token = moment - transcript.begin
            answer.chunks += 1
            last = moment
    if answer.completion_tokens != max_tokens:
        raise LoadError(f"asked for {max_tokens} tokens, got {answer.completion_tokens}")
    return answer
