"""Clients of all kinds at once, some of them rude, on one server for a while."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gguf import GGUFReader
from support.models.lora import write_adapter
from support.runs.waiting import until
from support.server.soak.fuzz import Fuzz
from support.server.soak.server import Server, SoakError
from support.server.soak.start import model_server
from support.server.soak.streams import MIB, WORKER_FILES
from support.server.soak.wire import Connection, Reply

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ADAPTER = "adapter"  # its name at the server
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
WORDS = ["river", "stone", "light", "seven", "winter", "cup", "paper", "north", "green", "quiet"]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "count": {"type": "integer"}},
    "required": ["city", "count"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
POLITE = {429, 503}
ENDED = re.compile(rb'"finish_reason": ?"(?:length|stop)".*\ndata: \[DONE\]\n\n\Z', re.DOTALL)
KV_CACHE = "160MiB"  # soon full: until then its pages are new memory
RUDE_SECONDS, LEAVE_SECONDS = 0.1, 0.5  # between two requests of one client each, which is no flood
CUTS = ("half a body", "queued", "in its prompt", "in its answer")


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, and a check of its answer if the status is 200."""

    path: str
    body: dict[str, Any]
    is_whole: Callable[[Reply], bool]


def linears_of(model: Path) -> dict[str, tuple[int, int]]:
    """Return (out_features, in_features) of a GGUF file's attention, by PEFT's names."""
    shapes = {}
    for tensor in GGUFReader(model).tensors:
        if found := re.fullmatch(r"blk\.(\d+)\.attn_([qkv])\.weight", tensor.name):
            inputs, outputs = (int(size) for size in tensor.shape)
            shapes[f"model.layers.{found[1]}.self_attn.{found[2]}_proj"] = (outputs, inputs)
    return shapes


@contextmanager
def mixed_server(folder: Path, model: Path, **environment: str) -> Iterator[Server]:
    """Serve a GGUF file, with an adapter of random numbers."""
    adapter = write_adapter(folder / ADAPTER, linears_of(model))
    names = ("--served-model-name", "soak", "--lora", f"{ADAPTER}={adapter}")
    arguments = (*names, "--kv-cache-memory", KV_CACHE)
    with model_server(folder, model, *arguments, **environment) as server:
        yield server


def text_of(dice: random.Random, words: int) -> str:
    """Words in an order that is in no cache yet."""
    return " ".join(dice.choices(WORDS, k=words))


def chat(dice: random.Random, words: int = 12, **more: Any) -> dict[str, Any]:
    """A short chat."""
    return {"messages": [{"role": "user", "content": text_of(dice, words)}], **more}


def short(dice: random.Random) -> Ask:
    return Ask(CHAT, chat(dice, stream=True, max_tokens=dice.randrange(4, 40)), _has_ended)


def messages(dice: random.Random) -> Ask:
    body = chat(dice, stream=True, max_tokens=dice.randrange(4, 40), model="soak")
    return Ask("/v1/messages", body, lambda reply: b"event: message_stop" in reply.body)


def long(dice: random.Random) -> Ask:
    words = dice.randrange(1500, 4000)
    return Ask(COMPLETE, {"prompt": text_of(dice, words), "max_tokens": 8}, _has_choices(1))


def schema(dice: random.Random) -> Ask:
    form = {"type": "json_schema", "json_schema": {"name": "found", "schema": SCHEMA}}
    body = chat(dice, response_format=form, max_tokens=60)
    return Ask(CHAT, body, lambda reply: _fits(_choice(reply)["message"]["content"], reply))


def tools(dice: random.Random) -> Ask:
    body = chat(dice, tools=[TOOL], tool_choice="required", max_tokens=60)

    def is_whole(reply: Reply) -> bool:
        calls = _choice(reply)["message"].get("tool_calls") or []
        return all(_fits(call["function"]["arguments"], reply) for call in calls)

    return Ask(CHAT, body, is_whole)


def several(dice: random.Random) -> Ask:
    n = dice.randrange(2, 5)
    forms: list[dict[str, Any]] = [{"use_beam_search": True}, {"logprobs": 2}, {"best_of": n + 1}]
    body = {"prompt": text_of(dice, 20), "n": n, "max_tokens": 12, **dice.choice(forms)}
    return Ask(COMPLETE, body, _has_choices(n))


def vectors(dice: random.Random) -> Ask:
    texts = [text_of(dice, dice.randrange(1, 60)) for _ in range(dice.randrange(1, 5))]
    body = {"input": texts, "model": "soak"}
    return Ask(
        "/v1/embeddings", body, lambda reply: len(json.loads(reply.body)["data"]) == len(texts)
    )


def adapted(dice: random.Random) -> Ask:
    body = {"model": ADAPTER, "prompt": text_of(dice, 15), "max_tokens": 16}
    return Ask(COMPLETE, body, lambda reply: json.loads(reply.body)["model"] == ADAPTER)


def ollama(dice: random.Random) -> Ask:
    body = chat(dice, model="soak", stream=True, options={"num_predict": 12})
    return Ask("/api/chat", body, lambda reply: b'"done":true' in reply.body.replace(b" ", b""))


POLITE_CLIENTS = (short, messages, long, schema, tools, several, vectors, adapted, ollama)


class Household:
    """Clients that share a server; counts their answers.

    Args:
        server: under test, whose models are "soak" and `ADAPTER`.
        seconds: for which its members ask.
        seed: of all random choices.
    """

    def __init__(self, server: Server, seconds: float, seed: int) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.time() + seconds
        self._seed = seed
        self.answers: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.firsts: list[float] = []  # seconds to the first byte of short streams

    @property
    def goes_on(self) -> bool:
        return self._loop.time() < self._end

    async def polite(self, ask: Callable[[random.Random], Ask]) -> None:
        """Send one request after another, each once the answer before is whole."""
        dice = random.Random(f"{self._seed} {ask.__name__}")
        async with Connection(self._server.url) as connection:
            while self.goes_on:
                asked = ask(dice)
                reply = await connection.post(asked.path, asked.body)
                self.answers[ask.__name__][str(reply.status)] += 1
                if reply.status in POLITE:
                    await asyncio.sleep(1.0)
                elif reply.status != 200 or not asked.is_whole(reply):
                    said = f"{reply.status}: {reply.body[-800:]!r}"
                    raise SoakError(f"{ask.__name__}: {asked.body}: {said}")
                elif ask is short:
                    self.firsts.append(reply.first)

    async def leaver(self) -> None:
        """Disconnect in each phase of a request in turn."""
        dice = random.Random(f"{self._seed} leaver")
        while self.goes_on:
            for phase in CUTS:
                words = 2500 if phase == "in its prompt" else 10
                body = json.dumps(chat(dice, words, stream=True, max_tokens=400)).encode()
                async with Connection(self._server.url) as connection:
                    await connection.begin("POST", CHAT, body, whole=phase != CUTS[0])
                    if phase == "in its prompt":
                        await asyncio.sleep(0.1)
                    elif phase == "in its answer":
                        reader, _ = await connection.open()
                        await reader.readuntil(b"\n\n")
                self.answers["leaver"][phase] += 1
                await asyncio.sleep(LEAVE_SECONDS)

    async def rude(self) -> None:
        """Send malformed requests."""
        async with Connection(self._server.url) as connection:
            document = json.loads((await connection.ask("GET", "/openapi.json")).body)
            requests = Fuzz(document, self._seed)
            while self.goes_on:
                method, path, body = requests.next()
                reply = await connection.ask(method, path, body)
                self.answers["rude"][str(reply.status)] += 1
                await asyncio.sleep(RUDE_SECONDS)
                if reply.status >= 500 and reply.status not in POLITE:
                    raise SoakError(f"{reply.status} for {method} {path} {body!r}: {reply.body!r}")


async def mixed(
    server: Server, *, seconds: float, growth_mib: float = 64.0, seed: int = 17
) -> dict[str, Any]:
    """Let one client of each kind ask for a while, including one that disconnects and a rude one.

    The memory after the first fifth of the time is the baseline.

    Args:
        server: under test, with the adapter `ADAPTER`.
        seconds: in all.
        growth_mib: that the resident memory may grow by after the warm-up.
        seed: of the requests.

    Raises:
        SoakError: an answer is neither whole nor a polite refusal, the memory or the open files
            grow, or the server is not as before.
    """
    before = server.held()
    household = Household(server, seconds, seed)
    async with asyncio.TaskGroup() as group:
        for ask in POLITE_CLIENTS:
            group.create_task(household.polite(ask))
        group.create_task(household.leaver())
        group.create_task(household.rude())
        await asyncio.sleep(seconds / 5)
        warm = server.held()
        await asyncio.sleep(seconds * 0.75)
        held = server.held()
    await server.check()
    await until(
        lambda: server.process.num_fds() <= before.files + WORKER_FILES,
        lambda: f"open files went from {before.files} to {server.process.num_fds()}",
    )
    firsts = sorted(household.firsts)
    found = {
        "answers": {name: dict(found) for name, found in household.answers.items()},
        "first_byte_p50": round(firsts[len(firsts) // 2], 3),
        "first_byte_p99": round(firsts[len(firsts) * 99 // 100], 3),
        "rss_mib": [round(warm.rss / MIB), round(held.rss / MIB)],
        "files": [before.files, held.files, server.process.num_fds()],
    }
    if (grown := (held.rss - warm.rss) / MIB) > growth_mib:
        raise SoakError(f"the memory grew by {grown:.0f} MiB: {found}")
    return found


def _choice(reply: Reply) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(reply.body)["choices"][0]
    return found


def _has_ended(reply: Reply) -> bool:
    return ENDED.search(reply.body) is not None


def _has_choices(count: int) -> Callable[[Reply], bool]:
    return lambda reply: len(json.loads(reply.body)["choices"]) == count


def _fits(text: str, reply: Reply) -> bool:
    """Whether a text matches the schema, or was cut."""
    if _choice(reply)["finish_reason"] == "length":
        return True
    found = json.loads(text)
    return found.keys() == {"city", "count"} and found["city"] in ("Oslo", "Rome")
