"""Open WebUI in headless Chromium: a question whose answer needs one of its own tools."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import httpx
import pytest
from support.runs.fetched import ROOT
from support.runs.waiting import LIMIT, until
from support.server.browser import chromium
from support.server.free_ports import free_port

from tests.server.agents.conftest import Play, Rules, call

PROGRAM = ROOT / ".cache/tools/open-webui/bin/open-webui"
QUESTION = "What time is it"
TOOL = "get_current_timestamp"
ANSWER = "The tool has told me the time."


async def ask(url: str) -> str:
    """Type the question; return what the page shows once it is answered."""
    async with chromium() as browser:
        page = await browser.new_page()
        news = page.get_by_text(re.compile("Okay, Let.s Go"))  # covers the rest at first
        await page.add_locator_handler(news, lambda button: button.click())
        await page.goto(url)
        await page.locator("#chat-input").click(timeout=4 * LIMIT * 1000)
        await page.keyboard.type(QUESTION)
        await page.keyboard.press("Enter")
        await page.get_by_text(ANSWER).first.wait_for(timeout=LIMIT * 1000)
        return await page.inner_text("body")


@pytest.mark.slow
async def test_a_question_is_answered_with_a_tool(play: Play, home: Path) -> None:
    if not PROGRAM.exists():
        pytest.skip("no Open WebUI is there; scripts/test_tools open-webui fetches its 7 GB")
    rules: Rules = [
        {"contains": [QUESTION, '"current_timestamp"'], "says": ANSWER},
        {"contains": [QUESTION, "current_iso"], "says": ANSWER},
        {"contains": [QUESTION, TOOL], "says": call(TOOL)},
        {"says": "A title"},  # it asks for follow-ups and tags as well
    ]
    port = free_port()
    async with play(rules) as running:
        environment = {
            "DATA_DIR": str(home),
            "OFFLINE_MODE": "true",
            "HF_HUB_OFFLINE": "1",
            "WEBUI_AUTH": "False",
            "WEBUI_SECRET_KEY": "none",
            "ENABLE_OLLAMA_API": "False",
            "RAG_EMBEDDING_ENGINE": "openai",
            "OPENAI_API_BASE_URL": f"{running.url}/v1",
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
            assert f"View Result from {TOOL}" in await ask(url)
        finally:
            process.terminate()
            await process.wait()
        await until(running.idle)
