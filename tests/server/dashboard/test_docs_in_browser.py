"""The documentation as headless Chromium shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.server.browser import opened

from appliance.docs import NAMES, read

if TYPE_CHECKING:
    from playwright.async_api import Browser

    from tests.server.conftest import Serve

pytestmark = pytest.mark.asyncio(loop_scope="session")  # event loop of the browser


async def test_every_topic_is_shown_and_links_lead_from_one_to_the_next(
    serve: Serve, browser: Browser
) -> None:
    async with (
        serve() as running,
        opened(browser, running.url) as (page, complaints),
    ):
        await page.locator("a", has_text="Documentation").click()
        await page.locator("#topic h3").first.wait_for()
        assert await page.locator("#topics a").count() == len(NAMES)
        for name in NAMES:
            await page.locator(f'#topics a[href="#{name}"]').click()
            heading = page.locator("#topic h3").first
            await heading.filter(has_text=read(name).title).wait_for()
            text = await page.locator("#topic").inner_text()
            assert "<!--" not in text
            assert ".md)" not in text
        await page.locator('#topics a[href="#memory-and-cache"]').click()
        await page.locator("#topic a", has_text="Quantize").click()
        await (
            page.locator("#topic h3", has_text="How to read a card")
            .or_(page.locator("#topic h4", has_text="How to read a card"))
            .wait_for()
        )
        assert await page.locator("#topic table").count() > 2
        assert complaints == []
