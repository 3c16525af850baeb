"""Measure the API process by itself: processor time per streamed token, memory, start.

The engine behind it computes nothing and gives every stream a token per step at a fixed pace; the
tokenizer is a real model's. One client reads all streams. Processor time is the process's own, so
other work adds to it through cold caches only.

    scripts/benchmark api_cost  # the packaged default model's tokenizer
    scripts/benchmark api_cost --streams 16 --chat
"""

from __future__ import annotations

import argparse
import json
import random
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.bench.figures import spread
from appliance.commands.serve_banner import banner
from appliance.config import cache_dir, load_settings
from appliance.hub import resolve_model
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import ROOT, conditions

if TYPE_CHECKING:
    from appliance.server.api_server import RunningServer

# Larger than that of any tokenizer.
VOCABULARY = 2**20
ECHO = ROOT / "tests/support/echo_worker.py"
TEXT = (
    "The harbor was quiet when the first letters came, and nobody who lived behind the market "
    "had expected them. “Winter,” said the captain, who rarely said more, “takes its time.”\n"
)


def serve(model: str, steps_per_second: str) -> None:
    """Run `appliance serve` with an engine that repeats its prompt at a pace, as a child."""
    from appliance import log
    from appliance.server.model_state import ModelToServe
    from appliance.server.serve import run_server

    log.configure()
    resolved = resolve_model(model, cache_dir=cache_dir())
    pace = 1 / float(steps_per_second)
    knobs = f"step_seconds={pace} vocab_size={VOCABULARY} num_blocks=4096"

    def say_ready(ready: RunningServer) -> None:
        text = banner(ready.url, ready.name, ready.info)
        sys.stderr.write(f"{text}\nready {ready.url}\n")

    settings = load_settings({"port": 0, "max_num_seqs": 256, "max_model_len": 32_768})
    run_server(
        settings,
        [ModelToServe(resolved, settings.engine)],
        on_progress=lambda stage, done, total: None,
        on_ready=say_ready,
        engine_command=(sys.executable, str(ECHO), knobs),
    )


def processor_seconds(pid: int) -> float:
    """Return the processor time of all living threads."""
    schedules = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(text.split()[0]) for text in schedules) / 1e9


def resident_mib(pid: int) -> float:
    found = re.search(r"^VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) / 1024


def request(options: argparse.Namespace) -> bytes:
    words = TEXT.split(" ")
    text = " ".join(random.choices(words, k=300))
    asked = {"messages": [{"role": "user", "content": text}]} if options.chat else {"prompt": text}
    body: dict[str, Any] = {
        **asked,
        "max_tokens": options.tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.logprobs:
        body["logprobs"] = True if options.chat else 0
    data = json.dumps(body).encode()
    path = "/v1/chat/completions" if options.chat else "/v1/completions"
    return (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    ).encode() + data


def run(pid: int, port: int, streams: int, options: argparse.Namespace) -> tuple[float, float]:
    """Stream once; return microseconds of the API process per token, and tokens per second."""
    selector = selectors.DefaultSelector()
    received: dict[Any, bytearray] = {}
    for _ in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        received[connection] = bytearray()
        selector.register(connection, selectors.EVENT_READ)
    before, begin = processor_seconds(pid), time.perf_counter()
    for connection in received:
        connection.sendall(request(options))
    while selector.get_map():
        for key, _ in selector.select():
            data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
            received[key.fileobj] += data
            if not data or received[key.fileobj].endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                selector.unregister(key.fileobj)
    seconds, cost = time.perf_counter() - begin, processor_seconds(pid) - before
    tokens = 0
    for connection, text in received.items():
        connection.close()
        (usage,) = re.findall(rb'"completion_tokens":(\d+)', text)
        tokens += int(usage)
    return cost / tokens * 1e6, tokens / seconds


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="", help="whose tokenizer; default: the packaged one")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=500, help="per stream")
    parser.add_argument("--steps-per-second", default="75")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--chat", action="store_true", help="chat completions")
    parser.add_argument("--logprobs", action="store_true")
    options = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "api_cost", "conditions": conditions()}
    result["load"] = {name: value for name, value in vars(options).items() if name != "out"}
    begin = time.perf_counter()
    command = [sys.executable, __file__, "--serve", options.model, options.steps_per_second]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            for line in server.stderr:
                if line.startswith("ready "):
                    break
                sys.stderr.write(line)
            else:
                raise SystemExit("the server did not start")
            result["start_seconds"] = round(time.perf_counter() - begin, 2)
            result["start_processor_seconds"] = round(processor_seconds(server.pid), 2)
            port = int(line.rsplit(":", 1)[1])
            result["resident_mib_after_start"] = round(resident_mib(server.pid), 1)
            run(server.pid, port, 2, options)  # warm-up
            result["rows"] = []
            for streams in options.streams:
                runs = [run(server.pid, port, streams, options) for _ in range(options.repeats)]
                costs, rates = zip(*runs, strict=True)
                result["rows"].append(
                    {
                        "streams": streams,
                        "microseconds_per_token": spread(list(costs)),
                        "tokens_per_second": spread(list(rates)),
                    }
                )
            result["resident_mib_after_run"] = round(resident_mib(server.pid), 1)
        finally:
            server.send_signal(signal.SIGTERM)
    write_result(options.out, result)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
    else:
        main()
