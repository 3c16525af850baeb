"""Checks the port, the server behind it, and a sample of its answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from appliance.config import authority_to_trust, server_to_watch
from appliance.doctor.finding import Finding, Grade, Scope
from appliance.doctor.server_facts import (
    SAMPLE_PROMPT,
    SAMPLE_TOKENS,
    ServerFacts,
    Timings,
    ask_server,
    time_sample,
)
from appliance.errors import ApplianceError, ConfigError
from appliance.tui.server import Server
from appliance.version import __version__

if TYPE_CHECKING:
    from appliance.engine.nouns.sampling_params import SamplingParams

_START = "start one with `appliance serve`, or name another with --url"


def check_port(scope: Scope) -> Iterator[Finding]:
    """Listen on the configured address for a moment, if it is free."""
    from appliance.server.http.listener import bind

    where = f"{scope.server.host} port {scope.server.port}"
    try:
        bind(scope.server).close()
    except ConfigError as error:
        holder = _listener_of(scope.server.port)
        if holder is None and "in use" not in str(error):
            yield Finding("port", Grade.FAIL, str(error), "follow this message")
        elif scope.url is None and asyncio.run(ask_server(_server(scope))).is_ours:
            yield Finding("port", Grade.OK, f"{where} is held by our server")
        else:
            who = holder or "a program of another user"
            fix = f"stop {who}, or choose another port with --port"
            yield Finding("port", Grade.FAIL, f"{where} is in use by {who}", fix)
    else:
        yield Finding("port", Grade.OK, f"{where} is free")


def check_server(scope: Scope) -> Iterator[Finding]:
    """Ask the configured server, or the one that a flag names, for its state."""
    server = _server(scope)
    facts = asyncio.run(ask_server(server))
    if facts.problem is not None:
        grade = Grade.UNKNOWN if scope.url is None else Grade.FAIL
        yield Finding("server", grade, f"no answer from {_shown(server)}: {facts.problem}", _START)
        return
    if not facts.is_ours:
        found, fix = (
            f"{_shown(server)} answers, but is no appliance",
            "choose another port, or --url",
        )
        yield Finding("server", Grade.FAIL, found, fix)
        return
    grade = Grade.OK if facts.works else Grade.WARN
    fix = "" if facts.works else "wait until it is loaded; its log says more"
    yield Finding("server", grade, f"{_shown(server)}: {facts.health}", fix)
    yield _key(server, facts)
    if facts.unused_gpu:
        found, _, fix = facts.unused_gpu.partition("; ")
        yield Finding("server's GPU", Grade.WARN, found, fix)
    for words in facts.ranks:
        fix = "appliance doctor tests the links of GPUs anew" if ", since " in words else ""
        yield Finding("rank", Grade.WARN if fix else Grade.OK, words, fix)
    if facts.version is not None and facts.version != __version__:
        found = f"the server is {facts.version}, this command {__version__}"
        yield Finding("version", Grade.WARN, found, "restart the server")
    elif facts.version is not None:
        yield Finding("version", Grade.OK, facts.version)


def check_sample(scope: Scope) -> Iterator[Finding]:
    """Time a short answer by the server, or by the model in this process."""
    import httpx

    if scope.is_quick:
        yield Finding("sample", Grade.UNKNOWN, "left out by --quick")
        return
    server = _server(scope)
    facts = asyncio.run(ask_server(server))
    fix = "see the server's log; --log-level debug says more"
    if facts.is_ours and facts.models:
        try:
            timings = asyncio.run(time_sample(server, facts.models[0]))
        except (httpx.HTTPError, ValueError) as error:
            found = str(error) or type(error).__name__
            yield Finding("sample", Grade.FAIL, found, fix)
        else:
            yield Finding("sample", Grade.OK, f"{facts.models[0]}: {timings}")
    elif scope.runs_model and scope.model is not None:
        from appliance.model.encoder.source import reads_only  # imports NumPy

        try:
            if reads_only(scope.model.path):
                found = "this model only reads texts; with --url a server of it is timed"
                yield Finding("sample", Grade.UNKNOWN, found)
                return
            found = _in_process(scope)
        except ApplianceError as error:
            fix = "follow this message; `appliance serve` plans memory the same way"
            yield Finding("sample", Grade.FAIL, str(error), fix)
        else:
            yield Finding("sample", Grade.OK, found)
    else:
        found = "no server answers; --model MODEL computes one in this process"
        yield Finding("sample", Grade.UNKNOWN, found)


def _key(server: Server, facts: ServerFacts) -> Finding:
    if facts.status in (401, 403):
        sent = "refuses the key that was sent" if _has_key(server) else "wants a key"
        fix = "set APPLIANCE_API_KEY to one that it knows; `appliance keys new` makes one"
        return Finding("server key", Grade.FAIL, f"it {sent} ({facts.status})", fix)
    if facts.status != 200:
        found = f"/v1/models answered {facts.status}"
        return Finding("server key", Grade.WARN, found, "see the server's log")
    sent = "the key is right" if _has_key(server) else "no key was sent, and none is wanted"
    return Finding("server key", Grade.OK, f"{sent}; it serves {', '.join(facts.models)}")


def _in_process(scope: Scope) -> str:
    """Load the model here and time it.

    Raises:
        ApplianceError: the model cannot be loaded or does not fit; the message has the memory plan.
    """
    assert scope.model is not None
    start = time.monotonic()
    from appliance.engine.nouns.sampling_params import (
        SamplingParams,  # imports the engine's messages
    )
    from appliance.llm import LLM

    settings = msgspec.structs.asdict(scope.engine)  # includes the file that a flag names
    options = {name: value for name, value in settings.items() if value is not None}
    llm = LLM(**options | {"model": str(scope.model.path)})
    loaded = time.monotonic() - start

    def seconds(num_tokens: int) -> float:
        begin = time.monotonic()
        sampling: SamplingParams = SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True
        )
        llm.generate(SAMPLE_PROMPT, sampling, progress=False)
        return time.monotonic() - begin

    seconds(1)  # the first steps warm up
    first, whole = seconds(1), seconds(SAMPLE_TOKENS)
    rate = (SAMPLE_TOKENS - 1) / max(whole - first, 1e-9)
    timings = Timings(first, rate, SAMPLE_TOKENS)
    return f"{scope.model.name} in this process, loaded in {loaded:.1f} s: {timings}"


def _server(scope: Scope) -> Server:
    url, key = server_to_watch(scope.url or scope.top.url, scope.config)
    ca_file = authority_to_trust(scope.top, scope.config) if scope.url is None else None
    return Server.at(url, key, ca_file or scope.top.ca_file)


def _has_key(server: Server) -> bool:
    return "Authorization" in server.headers


def _listener_of(port: int) -> str | None:
    """Name the process that listens on a port; None if this user may not see it."""
    import psutil

    try:
        found = psutil.net_connections("tcp")
    except psutil.Error:
        return None
    pids = [
        one.pid
        for one in found
        if one.status == psutil.CONN_LISTEN and getattr(one.laddr, "port", None) == port
    ]
    for pid in pids:
        if pid is not None:
            try:
                return f"{psutil.Process(pid).name()} (process {pid})"
            except psutil.Error:
                continue
    return None


def _shown(server: Server) -> str:
    return str(server.url).rstrip("/")
