"""Headless Chromium for tests of what a person sees in a browser."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from support.runs.waiting import LIMIT

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

# The first is the same engine without a browser around it: a page takes a fifth of the processor.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 800}


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """This machine's browser; skips the test if there is none."""
    from playwright.async_api import async_playwright  # takes seconds; few processes need it

    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium is installed; on Debian: apt-get install chromium-headless-shell")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has no sandbox for root
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=found, args=arguments)
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def opened(
    browser: Browser, url: str, *, width: int = 1280, height: int = 800, scheme: str = "light"
) -> AsyncIterator[tuple[Page, list[str]]]:
    """A page, and all its complaints and requests to other servers."""
    context = await browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if scheme == "dark" else "light",
    )
    page = await context.new_page()
    page.set_default_timeout(1000 * LIMIT)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
    page.on(
        "console",
        lambda message: (
            complaints.append(message.text)
            if message.type in ("error", "warning")
            # Chromium warns that a test reads a canvas slowly; the page itself reads none.
            and not message.text.startswith("Canvas2D")
            else None
        ),
    )
    page.on(
        "request",
        lambda request: (
            None
            if request.url.startswith((url.rstrip("/"), "ws:", "data:", "blob:"))
            else complaints.append(f"asked for {request.url}")
        ),
    )
    try:
        await page.goto(url)
        yield page, complaints
    finally:
        await context.close()
