"""Every protocol with its own client package, and a picture of scikit-image."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import anthropic
import httpx
import ollama
import openai
import pytest
from PIL import Image
from support.models.picture_models import PICTURE_MODELS, write_picture_model
from support.runs.fetched import pictures
from support.runs.waiting import LIMIT
from support.server.browser import chromium, opened

from appliance.chat.answer import ServerSource
from appliance.chat.dialogue import Dialogue
from appliance.chat.screen import ChatScreen
from appliance.chat.session import ChatSession
from appliance.server.openai_responses.history import MAX_CONVERSATION
from appliance.tui.server import Server as Address
from tests.e2e.clients.conftest import output_of_node
from tests.e2e.conftest import Server

if TYPE_CHECKING:
    from appliance.chat.question_line import QuestionLine

TOKENS = 12
QUESTION = "What is this?"
ENCODED = re.compile(r"Pictures[1-9]\d* encoded, \d+ ms each, [1-9]\d* met again")
CALL = {"name": "look", "arguments": {"at": "desk"}}


@dataclass(frozen=True, slots=True)
class Said:
    """An answer, its prompt's tokens, and the rows of pictures where the protocol counts them."""

    text: str
    prompt_tokens: int
    image_tokens: int | None = None


class Clients:
    """The packages of all protocols, each asking one question in its own form."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.openai = openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=LIMIT
        )
        self.anthropic = anthropic.Anthropic(
            base_url=url, api_key="none", max_retries=0, timeout=LIMIT
        )
        self.ollama = ollama.Client(host=url, timeout=LIMIT)

    def close(self) -> None:
        for client in (self.openai, self.anthropic, self.ollama):
            client.close()

    def chat(self, messages: list[Any]) -> Said:
        found = self.openai.chat.completions.create(
            model="tiny", messages=messages, temperature=0, max_tokens=TOKENS
        )
        usage = found.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        rows = usage.prompt_tokens_details.image_tokens
        return Said(found.choices[0].message.content or "", usage.prompt_tokens, rows)

    def responses(self, items: list[Any]) -> Said:
        found = self.openai.responses.create(
            model="tiny", input=items, temperature=0, max_output_tokens=TOKENS
        )
        assert found.usage is not None
        return Said(found.output_text, found.usage.input_tokens)

    def messages(self, messages: list[Any]) -> Said:
        found = self.anthropic.messages.create(
            model="tiny", messages=messages, max_tokens=TOKENS, extra_body={"temperature": 0}
        )
        text = "".join(block.text for block in found.content if block.type == "text")
        cached = found.usage.cache_read_input_tokens or 0
        return Said(text, found.usage.input_tokens + cached)

    def ollama_chat(self, messages: list[Any]) -> Said:
        options = {"temperature": 0, "num_predict": TOKENS}
        found = self.ollama.chat(model="tiny", messages=messages, options=options)
        return Said(found.message.content or "", found.prompt_eval_count or 0)

    def generate(self, prompt: str, *images: str | bytes) -> Said:
        options = {"temperature": 0, "num_predict": TOKENS}
        found = self.ollama.generate(model="tiny", prompt=prompt, images=images, options=options)
        return Said(found.response or "", found.prompt_eval_count or 0)


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    folder = tmp_path_factory.mktemp("pictures")
    write_picture_model("qwen3_vl", folder / "model", context=2048)
    options = ("--served-model-name", "tiny", "--allow-image-urls", "127.0.0.1")
    running = Server(folder / "log", str(folder / "model"), *options)
    asking = Clients(running.url)
    yield asking
    asking.close()
    with contextlib.suppress(ProcessLookupError):
        running.stop()


def png(name: str, size: tuple[int, int] = (150, 100)) -> bytes:
    """A photograph at a size that a body holds many times."""
    out = io.BytesIO()
    Image.open(pictures() / name).convert("RGB").resize(size).save(out, "PNG")
    return out.getvalue()


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url_of(data: bytes) -> str:
    return f"data:image/png;base64,{in_base64(data)}"


def chat_part(data: bytes, **fields: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(data), **fields}}


def block(data: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": in_base64(data)}
    return {"type": "image", "source": source}


def by_chat(clients: Clients, *images: bytes) -> Said:
    parts = [*map(chat_part, images), {"type": "text", "text": QUESTION}]
    return clients.chat([{"role": "user", "content": parts}])


def by_responses(clients: Clients, *images: bytes) -> Said:
    found = [{"type": "input_image", "image_url": url_of(one), "detail": "auto"} for one in images]
    parts = [*found, {"type": "input_text", "text": QUESTION}]
    return clients.responses([{"role": "user", "content": parts}])


def by_messages(clients: Clients, *images: bytes) -> Said:
    parts = [*map(block, images), {"type": "text", "text": QUESTION}]
    return clients.messages([{"role": "user", "content": parts}])


def by_ollama_chat(clients: Clients, *images: bytes) -> Said:
    return clients.ollama_chat([{"role": "user", "content": QUESTION, "images": images}])


def by_generate(clients: Clients, *images: bytes) -> Said:
    return clients.generate(QUESTION, *images)


DOORS: list[Callable[..., Said]] = [
    by_chat, by_responses, by_messages, by_ollama_chat, by_generate,
]  # fmt: skip


def refusal(ask: Callable[[], object]) -> tuple[int, str]:
    """Return the status of a refusal, and its message with a code if the protocol has one."""
    try:
        ask()
    except (openai.APIStatusError, anthropic.APIStatusError) as error:
        return error.status_code, json.dumps(error.body)
    except ollama.ResponseError as error:
        return error.status_code, error.error
    raise AssertionError("it was not refused")


def test_all_protocols_show_the_model_the_same(clients: Clients) -> None:
    from transformers import Qwen2VLImageProcessor

    data = png("coffee.png")
    answers = [door(clients, data) for door in DOORS]
    assert len({(said.text, said.prompt_tokens) for said in answers}) == 1
    processor = Qwen2VLImageProcessor(**PICTURE_MODELS["qwen3_vl"].processor)
    found = processor(Image.open(io.BytesIO(data)), return_tensors="np")
    rows = int(found["image_grid_thw"].prod()) // 4
    assert answers[0].image_tokens == rows
    without = by_chat(clients)
    assert without.image_tokens is None
    # Its two words stand around the rows.
    assert answers[0].prompt_tokens == without.prompt_tokens + rows + 2
    assert "vision" in (clients.ollama.show("tiny").capabilities or ())
    told = clients.openai.models.retrieve("tiny").model_extra or {}
    assert told["architecture"]["input_modalities"] == ["text", "image"]
    props = httpx.get(f"{clients.url}/props").json()
    assert props["modalities"] == {"vision": True, "audio": False}


def test_scores_of_a_prompt_begin_behind_its_pictures(clients: Clients) -> None:
    """As without one: the tokens behind the picture are those behind its end."""
    parts = [chat_part(png("coffee.png")), {"type": "text", "text": QUESTION}]
    told = clients.openai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": cast("Any", parts)}],
        temperature=0,
        max_tokens=1,
        extra_body={"prompt_logprobs": 0},
    )
    assert told.usage is not None
    places = (told.model_extra or {})["prompt_logprobs"]
    assert len(places) == told.usage.prompt_tokens
    scored = [place for place in places if place]
    assert not any(places[: -len(scored)])
    words = [next(iter(place.values()))["decoded_token"] for place in scored]
    assert words[0] == "<|vision_end|>"
    assert "".join(words[1:]).startswith(QUESTION)


def test_javascript_shows_the_model_the_same(clients: Clients, tmp_path: Path) -> None:
    file = pictures() / "coffee.png"
    wanted = by_chat(clients, file.read_bytes())
    assert wanted.image_tokens
    said = output_of_node("pictures.mjs", tmp_path, clients.url, str(file), QUESTION, str(TOKENS))
    assert said.pop("chat") == [wanted.text, wanted.prompt_tokens, wanted.image_tokens]
    assert said.keys() == {"responses", "messages", "ollama_file", "ollama_bytes", "generate"}
    assert all(found == [wanted.text, wanted.prompt_tokens] for found in said.values()), said


def test_the_chat_shows_the_model_the_same(clients: Clients, tmp_path: Path) -> None:
    file, data = tmp_path / "a cup.png", png("coffee.png")
    file.write_bytes(data)
    lines = iter((f"/image {file}", QUESTION, f"'{file}'", f"'{file}' {QUESTION}"))
    line = SimpleNamespace(read=lambda: next(lines, "/exit"))
    out = io.StringIO()
    session = ChatSession(
        ServerSource(Address.at(clients.url, None)),
        Dialogue("tiny", sampling={"temperature": 0, "max_tokens": TOKENS}),
        ("tiny",),
        2048,
        screen=ChatScreen(out, False),
    )
    session.talk(cast("QuestionLine", line))
    assert "with the next question: a cup.png, a cup.png" in out.getvalue()
    first, second = session.conversation.turns
    assert (first.answer, len(first.pictures), len(second.pictures)) == (
        by_chat(clients, data).text, 1, 2,
    )  # fmt: skip
    command = ["chat", "--url", clients.url, "--image", str(file), QUESTION]
    main = [sys.executable, "-m", "appliance", *command]
    asked = subprocess.run(main, capture_output=True, text=True, check=True, timeout=LIMIT)
    assert asked.stdout.strip()


GIVEN = """([how, name, data]) => {
    const bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
    const transfer = new DataTransfer();
    transfer.items.add(new File([bytes], name, { type: "image/png" }));
    const fields = { bubbles: true, cancelable: true };
    document.getElementById("prompt").dispatchEvent(
        how === "paste" ? new ClipboardEvent(how, { ...fields, clipboardData: transfer })
                        : new DragEvent(how, { ...fields, dataTransfer: transfer }));
}"""


async def test_a_person_sends_pictures_with_the_page(clients: Clients) -> None:
    """Chosen, pasted and dropped; shown beside the question, and sent again with the next one."""
    coffee, cat = png("coffee.png"), png("chelsea.png")
    file: Any = {"name": "coffee.png", "mimeType": "image/png", "buffer": coffee}
    async with chromium() as browser, opened(browser, clients.url) as (page, complaints):
        await page.locator("#state.ready").wait_for()
        shelf, shown = page.locator("#shelf img"), page.locator(".message.user img")
        await page.get_by_text("Settings").click()
        await page.get_by_label("Temperature").fill("0")
        await page.get_by_label("At most").fill(str(TOKENS))

        async def said(place: int) -> str:
            await page.locator("#figures", has_text="context ").wait_for()
            return await page.locator(".message.assistant .text").nth(place).inner_text()

        async with page.expect_file_chooser() as choosing:
            await page.get_by_role("button", name="Picture").click()
        await (await choosing.value).set_files([file])
        await page.evaluate(GIVEN, ["paste", "cat.png", in_base64(cat)])
        await page.evaluate(GIVEN, ["drop", "other.png", in_base64(coffee)])
        await shelf.nth(2).wait_for()
        names = [await shelf.nth(place).get_attribute("alt") for place in range(3)]
        assert names == ["coffee.png", "cat.png", "other.png"]
        await page.get_by_role("button", name="Take other.png away").click()
        assert await shelf.count() == 2
        async with page.expect_request("**/v1/chat/completions") as sending:
            await page.get_by_label("Message").fill(QUESTION)
            await page.get_by_role("button", name="Send").click()
        body = cast("Any", (await sending.value).post_data_json)
        assert body["messages"][0]["content"] == [
            chat_part(coffee), chat_part(cat), {"type": "text", "text": QUESTION},
        ]  # fmt: skip
        answer = await said(0)
        assert answer.split() == by_chat(clients, coffee, cat).text.split()
        assert await shelf.count() == 0
        assert await shown.count() == 2
        widths = [await one.evaluate("one => one.naturalWidth") for one in await shown.all()]
        assert widths == [150, 150]

        async with page.expect_request("**/v1/chat/completions") as sending:
            await page.get_by_label("Message").fill("More.")
            await page.get_by_role("button", name="Send").click()
        body = cast("Any", (await sending.value).post_data_json)
        assert [len(one["content"]) > 2 for one in body["messages"]][::2] == [True, True]
        assert len(body["messages"][0]["content"]) == 3
        await said(1)
        await page.locator("#facts", has_text=ENCODED).wait_for()
        broken: Any = {"name": "broken.png", "mimeType": "image/png", "buffer": b"no picture"}
        await page.get_by_label("Files of pictures").set_input_files([broken])
        await page.get_by_label("Message").fill("And this?")
        await page.get_by_role("button", name="Send").click()
        await page.get_by_text("these bytes are no image").wait_for()
        assert await shelf.count() == 1, "it goes back to where it was chosen"
        assert await page.get_by_label("Message").input_value() == "And this?"
        await page.get_by_role("button", name="New chat").click()
        assert await page.locator("img:not(h1 img)").count() == 0
    assert [one for one in complaints if "400 (Bad Request)" not in one] == []


def test_another_picture_of_the_same_size_is_another_prompt(clients: Clients) -> None:
    coffee, astronaut = png("coffee.png"), png("astronaut.png")
    for door in DOORS:
        one, other = door(clients, coffee), door(clients, astronaut)
        assert one.prompt_tokens == other.prompt_tokens
        assert one.text != other.text
        both = door(clients, coffee, astronaut)
        assert both.text != door(clients, astronaut, coffee).text


def test_pictures_of_tools_are_read(clients: Clients) -> None:
    data, told = png("coffee.png"), "Here:"
    arguments = json.dumps(CALL["arguments"])
    asked = {"role": "user", "content": "Look."}
    function = {"name": "look", "arguments": arguments}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    use = {"type": "tool_use", "id": "call_1", "name": "look", "input": CALL["arguments"]}
    answers = [
        clients.chat(
            [
                asked,
                {"role": "assistant", "content": None, "tool_calls": calls},
                {
                    "role": "tool",
                    "tool_call_id": "call_1",
                    "content": [chat_part(data), {"type": "text", "text": told}],
                },
            ]
        ),
        clients.responses(
            [
                asked,
                {"type": "function_call", "call_id": "call_1", **function},
                {
                    "type": "function_call_output",
                    "call_id": "call_1",
                    "output": [
                        {"type": "input_image", "image_url": url_of(data)},
                        {"type": "input_text", "text": told},
                    ],
                },
            ]
        ),
        clients.messages(
            [
                asked,
                {"role": "assistant", "content": [use]},
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "call_1",
                            "content": [block(data), {"type": "text", "text": told}],
                        }
                    ],
                },
            ]
        ),
        clients.ollama_chat(
            [
                asked,
                {"role": "assistant", "tool_calls": [{"function": CALL}]},
                {"role": "tool", "tool_name": "look", "content": told, "images": [data]},
            ]
        ),
    ]
    assert len({(said.text, said.prompt_tokens) for said in answers}) == 1
    assert answers[0].image_tokens


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Where the coffee is served by another server."""
    (tmp_path / "coffee.png").write_bytes(png("coffee.png"))
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/coffee.png"
        server.shutdown()


def test_pictures_are_fetched_from_hosts_that_the_owner_named(
    clients: Clients, address: str
) -> None:
    question = {"type": "text", "text": QUESTION}
    wanted = by_chat(clients, png("coffee.png"))

    def asked(url: str) -> list[Said]:
        chat = {"type": "image_url", "image_url": {"url": url}}
        item = {"type": "input_image", "image_url": url, "detail": "auto"}
        block = {"type": "image", "source": {"type": "url", "url": url}}
        text = {"type": "input_text", "text": QUESTION}
        return [
            clients.chat([{"role": "user", "content": [chat, question]}]),
            clients.responses([{"role": "user", "content": [item, text]}]),
            clients.messages([{"role": "user", "content": [block, question]}]),
        ]

    for said in asked(address):
        assert (said.text, said.prompt_tokens) == (wanted.text, wanted.prompt_tokens)
    for url, why in (
        (address.replace("127.0.0.1", "localhost"), "no pictures are fetched from localhost"),
        (address + "x", "answers 404"),
        ("file:///etc/passwd", "such addresses are not fetched"),
    ):
        status, text = refusal(partial(asked, url))
        assert status == 400
        assert why in text


def test_a_kept_response_keeps_its_pictures(clients: Clients) -> None:
    create = clients.openai.responses.create
    asked: Any = [
        {
            "role": "user",
            "content": [{"type": "input_image", "image_url": url_of(png("coffee.png"))}],
        }
    ]
    more: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": TOKENS}
    first = create(input=asked, **more)
    again: Any = [*asked, {"role": "assistant", "content": first.output_text}]
    ends: Any = [{"role": "user", "content": QUESTION}]
    kept = create(input=ends, previous_response_id=first.id, **more)
    whole = create(input=[*again, *ends], **more)
    assert kept.output_text == whole.output_text
    assert kept.usage is not None
    assert whole.usage is not None
    assert kept.usage.input_tokens == whole.usage.input_tokens


def test_a_kept_conversation_may_have_photographs(clients: Clients) -> None:
    """More of them than it may have of texts, in each of two requests."""
    create = clients.openai.responses.create
    out = io.BytesIO()
    Image.open(pictures() / "coffee.png").resize((1500, 1000)).save(out, "PNG", compress_level=0)
    image = {"type": "input_image", "image_url": url_of(out.getvalue()), "detail": "low"}
    asked: Any = [{"role": "user", "content": [image, image]}]
    assert 2 * len(image["image_url"]) > MAX_CONVERSATION
    more: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": TOKENS}
    first = create(input=asked, **more)
    kept = create(input=asked, previous_response_id=first.id, **more)
    again: Any = [*asked, {"role": "assistant", "content": first.output_text}]
    whole = create(input=[*again, *asked], **more)
    assert kept.usage is not None
    assert whole.usage is not None
    assert kept.output_text == whole.output_text
    assert kept.usage.input_tokens == whole.usage.input_tokens
    assert clients.openai.responses.retrieve(kept.id).id == kept.id


def test_streams_and_counts_agree_with_whole_answers(clients: Clients) -> None:
    data = png("coffee.png")
    wanted = by_chat(clients, data)
    parts: list[Any] = [block(data), {"type": "text", "text": QUESTION}]
    counted = clients.anthropic.messages.count_tokens(
        model="tiny", messages=[{"role": "user", "content": parts}]
    )
    assert counted.input_tokens == wanted.prompt_tokens
    asked: list[Any] = [
        {"role": "user", "content": [chat_part(data), {"type": "text", "text": QUESTION}]}
    ]
    stream = clients.openai.chat.completions.create(
        model="tiny",
        messages=asked,
        temperature=0,
        max_tokens=TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = stream
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == wanted.text
    assert last.usage is not None
    assert last.usage.prompt_tokens == wanted.prompt_tokens
    details = last.usage.prompt_tokens_details
    assert details is not None
    assert details.image_tokens == wanted.image_tokens


def test_a_context_that_pictures_fill_is_said_to_be_so(clients: Clients) -> None:
    parts = [chat_part(png("coffee.png"))] * 64 + [{"type": "text", "text": "x" * 2000}]
    status, text = refusal(lambda: clients.chat([{"role": "user", "content": parts}]))
    assert status == 400
    assert "context_length_exceeded" in text
    (rows,) = re.findall(r"has \d+ tokens \((\d+) of them image tokens\)", text)
    assert int(rows) == 64 * (by_chat(clients, png("coffee.png")).image_tokens or 0)
    assert "--image-tokens" in text


def test_base64_may_have_a_prefix_at_ollama(clients: Clients) -> None:
    data = png("coffee.png")
    body: dict[str, Any] = {"model": "tiny", "stream": False, "prompt": QUESTION}
    body["options"] = {"temperature": 0, "num_predict": TOKENS}
    said = [
        httpx.post(f"{clients.url}/api/generate", json={**body, "images": [one]}).json()
        for one in (in_base64(data), url_of(data))
    ]
    assert said[0]["response"] == said[1]["response"] == by_generate(clients, data).text


def test_little_detail_takes_no_more_rows(clients: Clients) -> None:
    data = png("coffee.png")
    rows = {
        detail: clients.chat([{"role": "user", "content": [chat_part(data, detail=detail)]}])
        for detail in ("auto", "low", "high", "original")
    }
    assert rows["auto"] == rows["high"] == rows["original"]
    assert (rows["low"].image_tokens or 0) <= (rows["auto"].image_tokens or 0)
    wrong = [{"role": "user", "content": [chat_part(data, detail="most")]}]
    status, text = refusal(lambda: clients.chat(wrong))
    assert status == 400
    assert "known are auto, low, high, original" in text


@pytest.mark.parametrize("door", DOORS)
def test_what_cannot_be_read_is_refused(clients: Clients, door: Callable[..., Said]) -> None:
    data = png("coffee.png")
    status, text = refusal(lambda: door(clients, data[: len(data) // 2]))
    assert status == 400
    assert "images[0]" in text or "content" in text
    if door in (by_chat, by_responses):
        assert '"code": "invalid_image"' in text
    status, text = refusal(lambda: door(clients, *[png("coffee.png", (8, 8))] * 65))
    assert status == 400
    assert "65 pictures, and at most 64" in text
    if door in (by_chat, by_responses):
        assert '"code": "too_many_images"' in text
    assert door(clients, data).text == by_chat(clients, data).text, "the server goes on"


def test_pictures_go_with_tools_formats_and_several_choices(clients: Clients) -> None:
    def ask(**fields: Any) -> Any:
        parts = [chat_part(png("coffee.png")), {"type": "text", "text": QUESTION}]
        given: list[Any] = [{"role": "user", "content": parts}]
        body = {"model": "tiny", "messages": given, "temperature": 0, "max_tokens": TOKENS}
        return clients.openai.chat.completions.create(**body | fields)

    plain = ask().choices[0].message.content
    assert [one.message.content for one in ask(n=3).choices] == [plain] * 3
    assert ask(seed=1, extra_body={"best_of": 2}).choices[0].message.content == plain
    beams = ask(n=2, extra_body={"use_beam_search": True, "best_of": 3}).choices
    assert len({one.message.content for one in beams}) == 2
    scored = ask(logprobs=True, top_logprobs=2).choices[0]
    found = b"".join(bytes(token.bytes) for token in scored.logprobs.content)
    assert re.sub(rb"<\|\w+\|>", b"", found).decode(errors="replace") == plain
    assert all(token.logprob == token.top_logprobs[0].logprob for token in scored.logprobs.content)

    schema = {
        "type": "object",
        "properties": {"it": {"enum": ["a cup", "a cat"]}},
        "required": ["it"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "seen", "schema": schema}}
    answer = ask(response_format=form, max_tokens=200).choices[0]
    assert answer.finish_reason == "stop"
    assert json.loads(answer.message.content)["it"] in ("a cup", "a cat")
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    called = ask(tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=200)
    (call,) = called.choices[0].message.tool_calls
    assert call.function.name == "look"
    assert json.loads(call.function.arguments)["it"] in ("a cup", "a cat")


# What Open WebUI 0.12.4 writes before the text of a question with an upload.
ATTACHED_FILES = (
    '<attached_files>\n<file type="file" id="f413a7dd" url="f413a7dd" content_type="image/png"'
    ' name="coffee.png"/>\n</attached_files>\n\n'
)
CLOCK = {"name": "get_current_timestamp", "parameters": {"properties": {}, "type": "object"}}


def test_requests_of_open_webui_are_answered(clients: Clients) -> None:
    """Bodies recorded between Open WebUI 0.12.4 and a server, in its order."""

    tools: list[Any] = [{"type": "function", "function": CLOCK}]

    def whole(messages: list[Any]) -> str:
        found: Any = clients.openai.chat.completions.create(
            model="tiny", messages=messages, tools=tools, max_tokens=TOKENS, temperature=0
        )
        return str(found.choices[0].message.content)

    def streamed(messages: list[Any]) -> str:
        body = {"stream": True, "model": "tiny", "messages": messages, "tools": tools}
        limits = {"max_tokens": TOKENS, "temperature": 0}  # of ours
        with httpx.stream("POST", f"{clients.url}/v1/chat/completions", json=body | limits) as got:
            assert got.status_code == 200
            events = [line[6:] for line in got.iter_lines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
        return "".join(delta.get("content") or "" for delta in deltas)

    def first(data: bytes) -> dict[str, Any]:
        texts = [{"type": "text", "text": text} for text in (ATTACHED_FILES, QUESTION)]
        return {"role": "user", "content": [*texts, chat_part(data)]}

    seen = png("coffee.png")
    answer = streamed([first(seen)])
    assert answer == whole([first(seen)])
    assert clients.chat([first(seen)]).image_tokens == by_chat(clients, seen).image_tokens
    later = [{"role": "assistant", "content": answer}, {"role": "user", "content": "And beside it"}]
    assert streamed([first(seen), *later]) == whole([first(seen), *later])
    for task in ("Generate a concise title", "Predict 3-5 useful messages", "Generate 1-3 tags"):
        messages = [{"role": "user", "content": f"### Task:\n{task}\n{answer}"}]
        body = {"model": "tiny", "messages": messages, "stream": False, "max_tokens": TOKENS}
        got = httpx.post(f"{clients.url}/v1/chat/completions", json=body)
        assert got.status_code == 200
    # To Ollama it sends the text of all parts, and the pictures without what precedes a comma.
    alone = clients.ollama_chat([{"role": "user", "images": [in_base64(seen)]}])
    assert alone == clients.ollama_chat([{"role": "user", "content": "", "images": [seen]}])


def test_a_turn_about_a_picture_is_continued(clients: Clients) -> None:
    whole = by_chat(clients, png("coffee.png"))
    question = [chat_part(png("coffee.png")), {"type": "text", "text": QUESTION}]

    def continued(data: bytes) -> str:
        first = [chat_part(data), *question[1:]]
        begun = [{"role": "user", "content": first}, {"role": "assistant", "content": "It is"}]
        return clients.chat(begun).text

    assert continued(png("coffee.png")) == continued(png("coffee.png"))
    assert continued(png("coffee.png")) != continued(png("chelsea.png")), "it sees the picture"
    assert by_chat(clients, png("coffee.png")) == whole


def test_what_is_not_in_the_request_is_refused_by_name(clients: Clients) -> None:
    address = "https://example.com/x.png"

    def asked(part: dict[str, Any]) -> list[Any]:
        return [{"role": "user", "content": [part]}]

    def chat(part: dict[str, Any]) -> tuple[int, str]:
        return refusal(lambda: clients.chat(asked(part)))

    def responses(part: dict[str, Any]) -> tuple[int, str]:
        return refusal(lambda: clients.responses(asked(part)))

    def messages(source: dict[str, Any]) -> tuple[int, str]:
        return refusal(lambda: clients.messages(asked({"type": "image", "source": source})))

    pdf = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
    for (status, text), word in (
        (chat({"type": "image_url", "image_url": {"url": address}}), "fetched from example.com"),
        (chat({"type": "file", "file": {"file_id": "file-1"}}), "'file'"),
        (responses({"type": "input_image", "image_url": address}), "fetched from example.com"),
        (responses({"type": "input_image", "file_id": "file-1"}), "files are not kept"),
        (responses({"type": "input_file", "file_data": "data:,"}), "'input_file'"),
        (messages({"type": "url", "url": address}), "fetched from example.com"),
        (messages({"type": "file", "file_id": "file-1"}), "type 'file'"),
        (refusal(lambda: clients.messages(asked({"type": "document", "source": pdf}))), "'base64'"),
    ):
        assert status == 400
        assert word in text
