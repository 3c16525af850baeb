"""The status page as a person sees it, in headless Chromium."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from typing import TYPE_CHECKING, Any

import pytest
from support.runs.waiting import until
from support.server.browser import PHONE, opened

from appliance.model_files.sampling_defaults import SamplingDefaults
from appliance.progress.jobs import JobFile
from appliance.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from playwright.async_api import Browser, Page

    from tests.server.conftest import Serve

pytestmark = pytest.mark.asyncio(loop_scope="session")  # event loop of the browser

MAP_COLOURS = """() => {
    const canvas = document.getElementById("map");
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    return new Set(Array.from({ length: data.length / 4 }, (_, i) =>
        data.slice(4 * i, 4 * i + 4).join())).size;
}"""


async def coloured(page: Page) -> bool:
    return bool(await page.evaluate(MAP_COLOURS) > 2)


async def say(page: Page, text: str) -> None:
    await page.get_by_label("Message").fill(text)
    await page.get_by_role("button", name="Send").click()


async def figures(page: Page) -> str:
    """The figures that the page shows when an answer ends."""
    found = page.locator("#figures", has_text="context ")
    await found.wait_for()
    return await found.inner_text()


async def test_a_person_chats_and_watches_without_a_key(serve: Serve, browser: Browser) -> None:
    async with (
        serve("holds_at=170") as running,  # the second answer continues until it is stopped
        opened(browser, running.url) as (page, complaints),
    ):
        await page.locator("#state.ready").wait_for()
        await page.get_by_text("256 blocks of 16").wait_for()
        assert await page.locator("#key-form").is_hidden()
        assert await page.locator("#replica-part").is_hidden(), "there is one process"
        assert await page.evaluate(MAP_COLOURS) == 2  # free blocks and the gaps between them
        assert await page.title() == "echo · Appliance"

        await say(page, "<b>hi</b>")
        answer = page.locator(".message.assistant")
        await page.get_by_text("Warnings and errors").click()
        await page.get_by_text("the first step of an echo").wait_for()
        text = await figures(page)
        assert "tokens/s" in text
        assert "first after" in text
        assert "<b>hi</b>" in await answer.inner_text(), "shown as text, not as markup"
        assert await page.locator(".message b").count() == 0
        assert await page.get_by_text("Sampling").count() == 0, "nothing is recommended"

        await say(page, "a" * 100)
        stop = page.get_by_role("button", name="Stop")
        await until(lambda: coloured(page), "more than two colours on the map")
        await page.locator(".assistant .text:not(:empty)").nth(1).wait_for()
        await stop.click()
        await page.get_by_text("stopped", exact=True).wait_for()
        await until(running.idle)
        assert await page.locator(".message").count() == 4
        assert await stop.is_disabled()

        await page.get_by_role("link", name="Metrics").click()
        await page.get_by_text("vllm:num_requests_running").first.wait_for()
        await page.get_by_role("button", name="Close").click()
        assert await page.locator("#viewer").is_hidden()
        await page.get_by_role("button", name="New chat").click()
        assert await page.locator(".message").count() == 0
        assert complaints == []


async def test_thoughts_are_folded_up_above_the_answer(
    serve: Serve, browser: Browser, tokenizer_with: Callable[..., Tokenizer]
) -> None:
    template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{# </think> #}"
    async with (
        serve(tokenizer=tokenizer_with(template)) as running,
        opened(browser, running.url) as (page, _),
    ):
        await page.locator("#state.ready").wait_for()
        await say(page, "<think>Hm <b>x</b>.</think>Yes.")
        await figures(page)
        answer = page.locator(".message.assistant")
        thoughts = answer.locator(".thoughts > div")
        assert await answer.locator(".text").inner_text() == "Yes."
        assert await thoughts.is_hidden()
        await answer.get_by_text("Thoughts").click()
        assert await thoughts.inner_text() == "Hm <b>x</b>."


async def test_what_was_stopped_before_an_answer_came_can_be_said_again(
    serve: Serve, browser: Browser, tmp_path: Path
) -> None:
    stopped = tmp_path / "stopped"
    async with (
        serve(f"holds_at=2 until={stopped}") as running,
        opened(browser, running.url) as (page, complaints),
    ):
        await page.locator("#state.ready").wait_for()
        message = page.get_by_label("Message")
        await say(page, "too early")
        await message.fill("and more")
        await page.get_by_role("button", name="Stop").click()
        await page.get_by_text("stopped", exact=True).wait_for()
        assert await page.locator(".message").count() == 0
        assert await message.input_value() == "too early\nand more"

        stopped.touch()
        await page.get_by_role("button", name="Send").click()
        await page.locator(".assistant .text:not(:empty)").wait_for()
        await page.get_by_role("button", name="New chat").click()
        await until(running.idle)
        assert await page.locator(".message").count() == 0
        assert await page.locator("#figures").inner_text() == ""
        async with page.expect_request("**/v1/chat/completions") as request:
            await say(page, "new")
        sent = (await request.value).post_data_json
        assert sent is not None
        assert sent["messages"] == [{"role": "user", "content": "new"}]
        assert complaints == []


async def sent_by(page: Page, button: str) -> dict[str, Any]:
    """The body of the request that a click sends."""
    async with page.expect_request(re.compile(r"/v1/.*completions$")) as request:
        await page.get_by_role("button", name=button, exact=True).click()
    body = (await request.value).post_data_json
    assert body is not None
    return dict(body)


async def test_settings_go_along_only_where_somebody_made_them(
    serve: Serve, browser: Browser
) -> None:
    async with (
        serve() as running,
        opened(browser, running.url) as (page, complaints),
    ):
        running.state.sampling = SamplingDefaults({"temperature": 0.2, "top_p": 0.9}, "a test")
        await page.locator("#settings-now", has_text="temperature 0.2").wait_for()
        await page.get_by_text("temperature 0.2, top p 0.9").wait_for()
        message = page.get_by_label("Message")
        await message.fill("a")
        first = await sent_by(page, "Send")
        assert first["messages"] == [{"role": "user", "content": "a"}]
        assert "temperature" not in first, "the server's default counts"
        await figures(page)

        await page.get_by_text("Settings", exact=False).first.click()
        await page.get_by_label("System prompt").fill("Be brief.")
        await page.get_by_label("Temperature").fill("1")
        await page.get_by_label("At most").fill("7")
        await page.get_by_text("temperature 1 · at most 7 tokens · a system prompt").wait_for()
        again = await sent_by(page, "Again")
        assert again["messages"] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "a"},
        ]
        assert (again["temperature"], again["max_tokens"]) == (1, 7)
        assert "cut off: Settings allow no more · 7 tokens" in await figures(page)
        assert await page.locator(".message").count() == 2, "the new answer replaces the old one"
        assert complaints == []


async def test_what_does_not_fit_is_answered_shorter_or_given_back(
    serve: Serve, browser: Browser
) -> None:
    async with (
        serve() as running,
        opened(browser, running.url) as (page, complaints),
    ):
        await page.locator("#state.ready").wait_for()
        info = running.engine.info
        assert info is not None
        await say(page, "a" * (info.context_length - 60))
        assert "cut off: the context is full" in await figures(page)
        message = page.get_by_label("Message")
        await say(page, "b" * 100)
        await page.locator(".error", has_text="New chat starts over").wait_for()
        assert await message.input_value() == "b" * 100
        assert await page.locator(".message.user").count() == 1
        assert {text for text in complaints if "400" not in text} == set()


async def test_a_model_without_a_chat_template_goes_on_with_a_text(
    serve: Serve, browser: Browser, tokenizer_folder: Path
) -> None:
    base = Tokenizer.from_path(tokenizer_folder)
    base.chat_template = None
    async with (
        serve(tokenizer=base) as running,
        opened(browser, running.url) as (page, complaints),
    ):
        await page.get_by_role("heading", name="Text", exact=True).wait_for()
        await page.get_by_text("Settings", exact=False).first.click()
        assert await page.get_by_label("System prompt").is_hidden()
        await page.get_by_label("At most").fill("3")
        await page.get_by_label("Message").fill("abc ")
        first = await sent_by(page, "Continue")
        assert (first["prompt"], first["max_tokens"]) == ("abc ", 3)
        await figures(page)
        assert await page.locator("#messages").inner_text() == "abc abc"
        assert (await sent_by(page, "Again"))["prompt"] == "abc "
        await page.locator("#again:not([disabled])").wait_for()
        assert (await sent_by(page, "Continue"))["prompt"] == "abc abc", "with nothing added"
        await page.locator("#again:not([disabled])").wait_for()
        assert await page.locator(".message.assistant").count() == 2
        await page.get_by_role("button", name="New text").click()
        assert await page.locator(".message").count() == 0
        assert complaints == []


async def test_an_answer_that_breaks_off_stays_and_can_be_asked_for_again(
    serve: Serve, browser: Browser, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    async with (
        serve(f"holds_at=130 until={broken}") as running,
        opened(browser, running.url) as (page, _),
    ):
        await page.locator("#state.ready").wait_for()
        await say(page, "a" * 100)
        await page.locator(".assistant .text:not(:empty)").wait_for()
        killed = running.engine.pid
        assert killed is not None
        broken.touch()
        os.kill(killed, signal.SIGKILL)
        await page.locator(".error", has_text="SIGKILL").wait_for()
        assert await page.locator(".assistant .text").inner_text() != ""
        # The page may still show the state before the restart.
        await until(lambda: running.engine.pid != killed and not running.state.unavailable)
        await page.get_by_role("button", name="Again").click()
        await page.locator("#again:not([disabled])").wait_for()
        assert await page.locator(".error").count() == 0
        assert await page.locator(".message").count() == 2


async def test_the_key_is_asked_for_and_stays_in_the_tab(serve: Serve, browser: Browser) -> None:
    async with (
        serve(server={"api_key": "secret-key"}) as running,
        opened(browser, running.url) as (page, complaints),
    ):
        field = page.get_by_label("API key")
        await field.wait_for()
        await field.fill("wrong")
        await page.get_by_role("button", name="Use this key").click()
        await page.get_by_text("The server refused this key.").wait_for()
        await field.fill("secret-key")
        await page.get_by_role("button", name="Use this key").click()
        await page.locator("#state.ready").wait_for()
        assert await page.locator("#key-form").is_hidden()
        await say(page, "hi")
        await figures(page)
        stored = await page.evaluate("[{...sessionStorage}, {...localStorage}, document.cookie]")
        assert stored == [{"appliance-key": "secret-key"}, {}, ""]
        await page.reload()
        await page.locator("#state.ready").wait_for()
        await page.get_by_role("button", name="Forget the key").click()
        await field.wait_for()
        assert {text for text in complaints if "401" not in text} == set()


async def test_the_blocks_of_any_replica_can_be_chosen(serve: Serve, browser: Browser) -> None:
    async with (
        serve(replicas=2, threads=2) as running,
        opened(browser, running.url) as (page, complaints),
    ):
        chosen = page.get_by_label("Replica")
        await chosen.wait_for()
        both = await chosen.locator("option").all_inner_texts()
        assert both == [f"{place}: ready, 0 running, 0 waiting" for place in range(2)]
        assert await chosen.input_value() == "0"
        async with page.expect_response(re.compile(r"/admin/v1/events\?replica=1$")):
            await chosen.select_option("1")
        await page.locator("#state.ready").wait_for()
        assert await chosen.input_value() == "1"
        assert complaints == []


async def test_a_page_that_nobody_looks_at_asks_for_nothing(serve: Serve, browser: Browser) -> None:
    async with (
        serve() as running,
        opened(browser, running.url) as (page, _),
    ):
        await page.clock.install()
        await page.reload()
        await page.locator("#state.ready").wait_for()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        hide = (
            "hidden => { Object.defineProperty(document, 'hidden', "
            "{ value: hidden, configurable: true });"
            "document.dispatchEvent(new Event('visibilitychange')); }"
        )
        ended = asyncio.create_task(page.wait_for_event("requestfailed"))
        await page.evaluate(hide, True)
        assert (await ended).url.endswith("/admin/v1/events"), "the feed is left"
        await page.clock.run_for(600_000)  # ten minutes pass at once
        assert asked == []
        await page.evaluate(hide, False)
        await until(lambda: bool(asked))
        assert asked[0].endswith("/admin/v1/events")


async def test_the_page_comes_back_when_the_server_does(serve: Serve, browser: Browser) -> None:
    async with (
        serve() as running,
        opened(browser, running.url) as (page, _),
    ):
        await page.locator("#state.ready").wait_for()
        await page.context.set_offline(True)
        running.server.closing = True  # ends the feed
        await page.get_by_text("no connection").wait_for()
        running.server.closing = False
        await page.context.set_offline(False)
        await page.locator("#state.ready").wait_for()


async def test_a_task_is_shown_with_stage_part_loss_and_time_until_it_ends(
    serve: Serve, browser: Browser, tmp_path: Path
) -> None:
    async with (
        serve() as running,
        opened(browser, running.url) as (page, complaints),
    ):
        running.server.jobs_folder = tmp_path
        tasks = page.locator("#jobs li")
        with JobFile(tmp_path, "quantize <tiny>") as job:
            job.update("choosing", 0, 0)
            await page.get_by_text("quantize <tiny>choosing").wait_for()
            assert await page.locator("progress").get_attribute("value") is None
            job.update(
                "quantizing", 5, 8, seconds_left=3723, part="layer 2", parts_done=3,
                parts_total=6, loss=0.0123456,
            )  # fmt: skip
            await tasks.get_by_text("left").wait_for()
            assert await tasks.inner_text() == (
                "quantize <tiny>\nquantizing · 62.5 % · layer 2 · 3 of 6 · loss 0.0123"
                " · 1:02:03 left"
            )
            assert await page.locator("progress").get_attribute("value") == "0.625"
        await tasks.wait_for(state="detached")
        assert complaints == []


async def test_nothing_is_wider_than_a_phone(serve: Serve, browser: Browser) -> None:
    async with (
        serve() as running,
        opened(browser, running.url, **PHONE, scheme="dark") as (page, complaints),
    ):
        await page.locator("#state.ready").wait_for()
        await say(page, "word" * 60)
        await figures(page)
        width = await page.evaluate("document.documentElement.scrollWidth")
        assert width <= PHONE["width"]
        buttons = await page.locator("button:visible").all()
        boxes = [await button.bounding_box() for button in buttons]
        assert all(box is not None and box["height"] >= 40 for box in boxes), "for fingers"
        assert complaints == []


async def test_a_model_of_texts_is_offered_no_picture(serve: Serve, browser: Browser) -> None:
    async with serve() as running, opened(browser, running.url) as (page, complaints):
        await page.locator("#state.ready").wait_for()
        assert await page.get_by_role("button", name="Picture").is_hidden()
        await page.evaluate("""() => {
            const transfer = new DataTransfer();
            transfer.items.add(new File(["x"], "cat.png", { type: "image/png" }));
            document.getElementById("prompt").dispatchEvent(
                new DragEvent("drop", { bubbles: true, cancelable: true, dataTransfer: transfer }));
        }""")
        await page.get_by_text("this model reads texts only").wait_for()
        await page.get_by_text("256 blocks of 16").wait_for()
        assert await page.get_by_text("Pictures", exact=True).count() == 0
        assert await page.locator("#shelf img").count() == 0
        assert not complaints
