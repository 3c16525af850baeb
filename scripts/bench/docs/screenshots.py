"""Take pictures of the dashboard in front of a server under load.

Start a server with the model, keep requests running that share a beginning, and save the screens
of `appliance top` as SVG.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import secrets
import sys
import tempfile
from pathlib import Path

import httpx

from appliance.bench.load import Endpoint
from appliance.bench.own_server import ServerProcess
from appliance.bench.serving import prompt_of
from appliance.tui.app import DashboardApp
from appliance.tui.client import EventFeed
from appliance.tui.controls import Controls
from appliance.tui.server import Server
from appliance.tui.terminal import Colors, DisplaySettings
from bench.lib.conditions import ROOT

FOLDER = ROOT / "tui" / "screenshots"
# Keys of the server that is started here; they are valid only while it runs.
KEYS = {name: secrets.token_hex(16) for name in ("anna", "codex", "home-assistant")}
WATCHING = secrets.token_hex(16)  # has no name, so it sees the hashes of everybody's blocks
PAGES = {
    "dashboard": ((160, 48), "", "dark"),
    "large": ((240, 67), "shift+tab", "dark"),
    "small": ((80, 24), "", "dark"),
    "map": ((160, 48), "2 shift+tab plus right right right down", "dark"),
    "precision": ((160, 48), "2 shift+tab c c c", "dark"),
    "requests": ((160, 40), "3 shift+tab", "light"),
}


async def keep_asking(
    client: httpx.AsyncClient, model: str, stop: asyncio.Event, seed: int, key: str
) -> None:
    """Send one person's requests, each as soon as the last is answered."""
    chance = random.Random(seed)
    headers = bearer(key)
    while not stop.is_set():
        question = prompt_of(chance.randrange(20, 400), 200, chance.randrange(10**6))
        body = {
            "model": model, "messages": [{"role": "user", "content": question}],
            "max_tokens": chance.randrange(100, 600), "temperature": 1.0, "ignore_eos": True,
            "stream": True,
        }  # fmt: skip
        try:
            async with client.stream(
                "POST", "/v1/chat/completions", json=body, headers=headers
            ) as answer:
                answer.raise_for_status()
                async for _ in answer.aiter_bytes():
                    if stop.is_set():
                        return
        except httpx.HTTPError:
            if not stop.is_set():
                raise


async def take(url: str, key: str, name: str, folder: Path, seconds: float) -> None:
    """Take one picture."""
    size, keys, theme = PAGES[name]
    server = Server.at(url, key)
    app = DashboardApp(
        EventFeed(server),
        controls=Controls(server),
        display=DisplaySettings(Colors.TRUECOLOR, theme=theme),
    )
    async with app.run_test(size=size) as pilot:
        await pilot.pause(seconds)
        if keys:
            await pilot.press(*keys.split())
        await pilot.pause(2.5)
        app.paint()
        await pilot.pause(0.2)
        # Without this, converters drop the spaces that hold columns apart.
        drawn = app.export_screenshot(title="").replace("<text ", '<text xml:space="preserve" ')
    path = folder / f"{name}.svg"
    path.write_text(drawn)
    print(path)


async def run(options: argparse.Namespace) -> None:
    """Serve, ask, and take all pictures."""
    if options.url:
        key = os.environ.get("APPLIANCE_API_KEY", "")
        await with_load(options.url, key, [key], options)
        return
    command = [sys.executable, "-m", "appliance", "serve", str(options.model), "--device", "cpu"]
    command += ["--port", str(options.port), "--kv-cache-memory", options.kv_cache_memory]
    command += ["--kv-cache-dtype", options.kv_cache_dtype]
    with tempfile.NamedTemporaryFile("w", prefix="keys-") as keys:
        keys.writelines([f"{WATCHING}\n", *(f"{name}={key}\n" for name, key in KEYS.items())])
        keys.flush()
        command += ["--api-key-file", keys.name]
        endpoint = Endpoint("127.0.0.1", options.port)
        server = ServerProcess(command, {"PYTHONPATH": str(ROOT)}, endpoint)
        try:
            await server.healthy()
            url = f"http://127.0.0.1:{options.port}"
            await with_load(url, WATCHING, list(KEYS.values()), options)
        finally:
            server.stop()


def bearer(key: str) -> dict[str, str]:
    """Return headers with the key, if there is one."""
    return {"Authorization": f"Bearer {key}"} if key else {}


async def with_load(url: str, watching: str, keys: list[str], options: argparse.Namespace) -> None:
    """Take all pictures of a server with one key, while people ask it with others."""
    stop = asyncio.Event()
    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as client:
        models = await client.get("/v1/models", headers=bearer(watching))
        model = models.raise_for_status().json()["data"][0]["id"]
        people = [
            asyncio.create_task(keep_asking(client, model, stop, seed, keys[seed % len(keys)]))
            for seed in range(options.concurrency)
        ]
        await asyncio.sleep(options.warm_up)
        for name in options.page or PAGES:
            await take(url, watching, name, options.folder, options.seconds)
        stop.set()
        await asyncio.gather(*people)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", help="GGUF file or folder")
    parser.add_argument("--url", help="a server that runs already, instead of a model")
    parser.add_argument("--page", action="append", choices=PAGES, help="only these [all]")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--port", type=int, default=8139)
    parser.add_argument("--kv-cache-memory", default="120MiB")
    parser.add_argument("--kv-cache-dtype", default="int4")
    parser.add_argument("--concurrency", type=int, default=14)
    parser.add_argument("--warm-up", type=float, default=20.0, help="seconds of work before")
    parser.add_argument("--seconds", type=float, default=30.0, help="watched before each picture")
    options = parser.parse_args()
    if (options.model is None) is (options.url is None):
        parser.error("name a model or --url, not both")
    options.folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(run(options))


if __name__ == "__main__":
    main()
