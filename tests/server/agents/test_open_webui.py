"""Open WebUI in headless Chromium: a question that needs one of its tools, and a picture."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from support.models.picture_models import write_picture_model
from support.runs.fetched import ROOT, pictures
from support.runs.waiting import LIMIT, until
from support.server.browser import chromium
from support.server.free_ports import free_port

from tests.e2e.conftest import Server
from tests.server.agents.conftest import Play, Rules, call

if TYPE_CHECKING:
    from playwright.async_api import Page

PROGRAM = ROOT / ".cache/tools/open-webui/bin/open-webui"
QUESTION = "What time is it"
TOOL = "get_current_timestamp"
ANSWER = "The tool has told me the time."


@asynccontextmanager
async def chatting(home: Path, server: str) -> AsyncIterator[Page]:
    """Open WebUI in front of a server, with the cursor in its line for questions."""
    if not PROGRAM.exists():
        pytest.skip("no Open WebUI is there; scripts/test_tools open-webui fetches its 7 GB")
    port = free_port()
    environment = {
        "DATA_DIR": str(home),
        "OFFLINE_MODE": "true",
        "HF_HUB_OFFLINE": "1",
        "WEBUI_AUTH": "False",
        "WEBUI_SECRET_KEY": "none",
        "ENABLE_OLLAMA_API": "False",
        "RAG_EMBEDDING_ENGINE": "openai",
        "OPENAI_API_BASE_URL": f"{server}/v1",
        "OPENAI_API_KEY": "none",
    }
    process = await asyncio.create_subprocess_exec(
        PROGRAM, "serve", "--host", "127.0.0.1", "--port", str(port),
        env={"PATH": os.environ["PATH"], "HOME": str(home), **environment},
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url) as http:

            async def serves() -> bool:
                assert process.returncode is None, "it ended"
                try:
                    return (await http.get("/health")).status_code == 200
                except httpx.HTTPError:
                    return False

            for _ in range(5):  # the start takes minutes on a busy machine
                try:
                    await until(serves)
                    break
                except AssertionError:
                    assert process.returncode is None
        async with chromium() as browser:
            page = await browser.new_page()
            news = page.get_by_text(re.compile("Okay, Let.s Go"))  # covers the rest at first
            await page.add_locator_handler(news, lambda button: button.click())
            await page.goto(url)
            await page.locator("#chat-input").click(timeout=4 * LIMIT * 1000)
            yield page
    finally:
        process.terminate()
        await process.wait()


async def ask(page: Page, question: str) -> None:
    await page.locator("#chat-input").click()
    await page.keyboard.type(question)
    await page.keyboard.press("Enter")


@pytest.mark.slow
async def test_a_question_is_answered_with_a_tool(play: Play, home: Path) -> None:
    rules: Rules = [
        {"contains": [QUESTION, '"current_timestamp"'], "says": ANSWER},
        {"contains": [QUESTION, "current_iso"], "says": ANSWER},
        {"contains": [QUESTION, TOOL], "says": call(TOOL)},
        {"says": "A title"},  # it asks for follow-ups and tags as well
    ]
    async with play(rules) as running:
        async with chatting(home, running.url) as page:
            await ask(page, QUESTION)
            await page.get_by_text(ANSWER).first.wait_for(timeout=LIMIT * 1000)
            assert f"View Result from {TOOL}" in await page.inner_text("body")
        await until(running.idle)


@pytest.mark.slow
async def test_a_picture_is_uploaded_and_asked_about_twice(home: Path, tmp_path: Path) -> None:
    folder = write_picture_model("qwen3_vl", tmp_path / "model", context=1 << 16)
    server = await asyncio.to_thread(
        Server, tmp_path / "log", str(folder), "--served-model-name", "tiny"
    )

    def counted(name: str) -> float:
        return server.gauge(f"appliance_picture{name}_total")

    try:
        async with chatting(home, server.url) as page:
            files = page.locator("input[type=file]").first
            await files.set_input_files(pictures() / "coffee.png")
            shown = page.locator("#message-input-container img, form img").first
            await shown.wait_for(timeout=LIMIT * 1000)
            await ask(page, "What is this")
            await until(lambda: counted("s_encoded") == 1, "the first question has the picture")
            stop = page.get_by_label("Stop")
            if await stop.count():
                await stop.first.click()  # a random model talks for ever
            await ask(page, "And beside it")
            await until(lambda: counted("_hits") >= 1, "the second has it, too")
            assert counted("s_encoded") == 1
    finally:
        await asyncio.to_thread(server.stop)
