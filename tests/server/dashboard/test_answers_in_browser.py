"""Answers in Markdown, as headless Chromium shows them, hostile and growing ones included."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from support.runs.waiting import until
from support.server.browser import opened

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from playwright.async_api import Browser, Page

    from tests.server.conftest import Serve

pytestmark = pytest.mark.asyncio(loop_scope="session")  # event loop of the browser

# Draw an answer, optionally in pieces; return the result.
DRAW = """async ([pieces, isOpen]) => {
    const { Answer } = await import("./markdown.js");
    const place = document.createElement("div");
    document.getElementById("messages").replaceChildren(place);
    const answer = new Answer(place, () => {});
    for (const piece of pieces) { answer.append(piece); answer.draw(); }
    if (!isOpen) answer.end();
    globalThis.answer = answer;
    return place.innerHTML;
}"""
# Every element and attribute of the result, and the targets of its links.
FOUND = """() => {
    const all = [...answer.element.querySelectorAll("*")];
    return {
        tags: [...new Set(all.map((one) => one.localName))],
        attributes: [...new Set(all.flatMap((one) => one.getAttributeNames()))],
        links: all.filter((one) => one.href).map((one) => one.protocol),
        text: answer.element.textContent,
    };
}"""
TAGS = {
    "p", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "hr", "br", "em", "strong", "s",
    "a", "code", "pre", "div", "span", "button", "table", "thead", "tbody", "tr", "th", "td",
}  # fmt: skip
ATTRIBUTES = {"dir", "class", "href", "title", "target", "rel", "start", "tabindex", "type"}

HOSTILE = [
    "<script>globalThis.hit = 1</script>",
    "<img src=x onerror=globalThis.hit=1>",
    "<svg onload=globalThis.hit=1><style>body{display:none}</style>",
    "<iframe srcdoc='<script>parent.hit=1</script>'></iframe>",
    "<a href='javascript:globalThis.hit=1'>x</a>",
    "&lt;img src=x onerror=globalThis.hit=1&gt;",
    "[x](javascript:globalThis.hit=1)",
    "[x](JaVaScRiPt:globalThis.hit=1)",
    "[x](&#106;avascript:globalThis.hit=1)",
    "[x](javascript&colon;globalThis.hit=1)",
    "[x](java\\\nscript:globalThis.hit=1)",
    "[x](\x01javascript:globalThis.hit=1)",
    "[x](vbscript:x) [y](file:///etc/passwd) [z](blob:http://127.0.0.1/x)",
    "[x](data:text/html;base64,PHNjcmlwdD5hbGVydCgxKTwvc2NyaXB0Pg==)",
    "[x]\n\n[x]: javascript:globalThis.hit=1",
    "<javascript:globalThis.hit=1>",
    "[x](/admin/v1/requests/1/abort) [y](metrics) [z](//evil.example/x)",
    '[x](http://good.example "><img src=x onerror=globalThis.hit=1>")',
    "![x](http://evil.example/pixel.png?secret) ![y](javascript:globalThis.hit=1) ![z](icon.svg)",
    '```"><img src=x onerror=globalThis.hit=1>\n</code><script>globalThis.hit=1</script>\n```',
    "| <img src=x onerror=globalThis.hit=1> |\n|---|\n| </td><script>globalThis.hit=1</script> |",
    "$</code><img src=x onerror=globalThis.hit=1>$ \\(<script>globalThis.hit=1</script>\\)",
    "> " * 300 + "deep",
    "- " * 300 + "deep",
    "*_" * 2000 + "x",
    "[" * 5000 + "](" * 5000,
    "\\(" * 8000 + "$" * 8000 + "`" * 8000,
    "\ud800 lone \u202e turned \u0000 nothing",
]

WORKS = """\
# One

Two **three** *four* ~~five~~ `six` [seven](https://example.org/a?b=1&c) https://example.org/bare
next line

1. a
2. b
   - c
   - d `e`

     f
- [ ] g

> h
> > i

| j | k |
|:--|--:|
| l | m |

```python
def n():
    return "<o>"
```

    p

Costs $5 or $10; $q_1 * r_1$, \\(s * t * u\\) and
\\[
v_2 = w_2 * x
\\]

---

[y][z] &amp; &lt;b&gt;

[z]: https://example.org/z
"""


@asynccontextmanager
async def page_of(serve: Serve, browser: Browser) -> AsyncIterator[tuple[Page, list[str]]]:
    async with (
        serve() as running,
        opened(browser, running.url) as (page, complaints),
    ):
        await page.locator("#state.ready").wait_for()
        yield page, complaints


async def draw(page: Page, *pieces: str, is_open: bool = False) -> str:
    markup: str = await page.evaluate(DRAW, [list(pieces), is_open])
    return markup


async def found(page: Page) -> dict[str, Any]:
    facts: dict[str, Any] = await page.evaluate(FOUND)
    return facts


async def test_no_answer_becomes_a_script_a_picture_or_a_link_that_does_something(
    serve: Serve,
    browser: Browser,
) -> None:
    async with page_of(serve, browser) as (page, complaints):
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
        for text in [*HOSTILE, "\n\n".join(HOSTILE)]:
            await draw(page, text)
            facts = await found(page)
            assert set(facts["tags"]) <= TAGS, text[:60]
            assert set(facts["attributes"]) <= ATTRIBUTES, text[:60]
            assert set(facts["links"]) <= {"http:", "https:", "mailto:"}, text[:60]
            for link in await page.locator("#messages a[href]").all():
                assert await link.get_attribute("rel") == "noopener noreferrer"
                assert await link.get_attribute("target") == "_blank"
        assert await page.evaluate("globalThis.hit") is None
        assert [url for url in asked if not url.endswith(("/markdown.js", "/markdown-it.js"))] == []
        assert complaints == []


async def test_a_hostile_answer_in_the_chat_itself(serve: Serve, browser: Browser) -> None:
    """The engine repeats the prompt, so that the page shows it as an answer."""
    text = "x\n\n<img src=x onerror=globalThis.hit=1>\n\n[a](javascript:globalThis.hit=1) **b**"
    async with page_of(serve, browser) as (page, complaints):
        await page.get_by_label("Message").fill(text)
        await page.get_by_role("button", name="Send").click()
        await page.locator(".assistant strong", has_text="b").wait_for()
        await page.locator("#again:not([disabled])").wait_for()
        assert await page.locator(".message img").count() == 0
        assert await page.locator(".message a").count() == 0
        assert "[a](javascript:globalThis.hit=1)" in await page.locator(".assistant").inner_text()
        assert await page.evaluate("globalThis.hit") is None
        assert complaints == []


async def test_the_browser_itself_refuses_to_make_markup_of_text(
    serve: Serve, browser: Browser
) -> None:
    from playwright.async_api import Error

    async with page_of(serve, browser) as (page, _):
        for script in (
            "document.body.innerHTML = '<b>x</b>'",
            "new DOMParser().parseFromString('<b>x</b>', 'text/html')",
            "document.createElement('script').text = 'globalThis.hit = 1'",
            "trustedTypes.createPolicy('any', { createHTML: (text) => text })",
        ):
            with pytest.raises(Error, match="TypeError"):
                await page.evaluate(script)


async def test_what_markdown_has_is_shown_as_what_it_is(serve: Serve, browser: Browser) -> None:
    async with page_of(serve, browser) as (page, complaints):
        await draw(page, WORKS)
        box = page.locator("#messages")
        assert await box.locator("h3").inner_text() == "One"
        for name, text in (("strong", "three"), ("em", "four"), ("s", "five")):
            assert await box.locator(name).all_inner_texts() == [text]
        assert await box.locator("p code:not(.math)").all_inner_texts() == ["six", "e"]
        assert await box.locator("li code").inner_text() == "e"
        assert await box.locator("ol > li > ul > li").count() == 2
        assert await box.locator("blockquote blockquote").inner_text() == "i"
        assert await box.locator("td.right").inner_text() == "m"
        assert await box.locator("pre").all_inner_texts() == ['def n():\n    return "<o>"\n', "p\n"]
        assert await box.locator(".code-head span").first.inner_text() == "python"
        math = await box.locator("code.math").all_text_contents()
        assert math == ["q_1 * r_1", "s * t * u", "v_2 = w_2 * x"]
        links = [await link.get_attribute("href") for link in await box.locator("a").all()]
        addresses = ("a?b=1&c", "bare", "z")
        assert links == [f"https://example.org/{address}" for address in addresses]
        text = await box.inner_text()
        assert "Costs $5 or $10; " in text
        assert "& <b>" in text
        assert complaints == []


async def test_an_answer_that_grows_ends_as_if_it_had_come_at_once(
    serve: Serve, browser: Browser
) -> None:
    async with page_of(serve, browser) as (page, _):
        at_once = await draw(page, WORKS)
        for size in (1, 2, 3, 7, 50):
            pieces = [WORKS[at : at + size] for at in range(0, len(WORKS), size)]
            assert await draw(page, *pieces) == at_once, size
        windows = WORKS.replace("\n", "\r\n")
        assert await draw(page, *windows.splitlines(keepends=True)) == at_once


async def test_what_is_drawn_stays_while_the_answer_grows(serve: Serve, browser: Browser) -> None:
    async with page_of(serve, browser) as (page, _):
        await draw(page, "First *words*.\n\n```python\nprint(", is_open=True)
        kept = await page.evaluate("""() => {
            const place = answer.element;
            const inside = place.querySelectorAll("em, .code, .copy, pre, code");
            const kept = [place.firstChild, ...inside];
            const letters = document.createTreeWalker(place.querySelector("pre"), 4).nextNode();
            getSelection().setBaseAndExtent(letters, 0, letters, 5);
            answer.append("1)\\n```\\n\\nLast *words*.");
            answer.draw();
            answer.end();
            return [kept.every((node) => node.isConnected), String(getSelection()), kept.length];
        }""")
        assert kept == [True, "print", 6]
        assert await page.locator("#messages pre").inner_text() == "print(1)\n"
        assert await page.locator("#messages em").all_inner_texts() == ["words", "words"]


async def test_only_the_block_that_grows_is_drawn_again(serve: Serve, browser: Browser) -> None:
    """A token costs no more at the end of a long answer than at its beginning."""
    async with page_of(serve, browser) as (page, _):
        await draw(page, *(f"Paragraph **{n}**.\n\n" for n in range(200)), "The last", is_open=True)
        changed = await page.evaluate("""async () => {
            const changes = [];
            new MutationObserver((records) => changes.push(...records)).observe(
                answer.element, { subtree: true, childList: true, characterData: true });
            answer.append(" one.");
            answer.draw();
            await new Promise((done) => setTimeout(done));
            return [changes.length, answer.text.length - answer.settled];
        }""")
        assert changed == [1, len("The last one.")]


async def test_a_block_reads_in_the_direction_of_its_letters(
    serve: Serve, browser: Browser
) -> None:
    async with page_of(serve, browser) as (page, _):
        await draw(page, "- \u0645\u0631\u062d\u0628\u0627 `code`\n\nand back")
        directions = await page.evaluate(
            "['ul', 'li', 'li code', 'p'].map((name) =>"
            " getComputedStyle(answer.element.querySelector(name)).direction)"
        )
        assert directions == ["rtl", "rtl", "ltr", "ltr"]


async def test_code_and_answers_are_copied_as_they_were_written(
    serve: Serve, browser: Browser
) -> None:
    async with page_of(serve, browser) as (page, _):
        await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        text = "x\n\n```c\nint *p;\n```"
        await page.get_by_label("Message").fill(text)
        await page.get_by_role("button", name="Send").click()
        await page.locator("#again:not([disabled])").wait_for()
        read = "navigator.clipboard.readText()"
        await page.locator(".code .copy").first.click()
        await page.get_by_text("Copied").wait_for()
        assert await page.evaluate(read) == "int *p;\n"
        await page.locator(".who .copy").click()

        async def copied() -> str:
            text: str = await page.evaluate(read)
            return text if "```c" in text else ""

        assert (await until(copied)).startswith("user\nx\n\n```c\nint *p;\n```")
