from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console
from support.quant.quality_cards import make_card

from appliance.commands.card_terminal import bar, print_card
from appliance.errors import CheckpointError
from appliance.quant.quality.card import (
    Card,
    ToolCalls,
    card_of,
    card_path,
    read_card,
    to_json,
    weights_fingerprint,
)
from appliance.quant.quality.card_html import to_html
from appliance.quant.quality.card_rows import to_markdown

VOID = {"meta", "br", "img", "link", "hr", "input"}


def lone_card() -> Card:
    """A card of a model without a base."""
    return replace(
        make_card(),
        base=None,
        comparison=None,
        histogram=None,
        layers=(),
        kv=(),
        kinds=(),
        calls=None,
        alternatives=(),
        quantize=None,
        tasks=(),
        notes=(),
    )


@pytest.mark.parametrize("card", [make_card(), lone_card()], ids=["whole", "alone"])
def test_a_card_comes_back_from_its_json(card: Card, tmp_path: Path) -> None:
    path = tmp_path / "quality.json"
    path.write_bytes(to_json(card))
    assert read_card(path) == card
    assert json.loads(path.read_text())["schema"] == 2


@pytest.mark.parametrize("content", [b"", b"[]", b'{"schema": 1}', b"\xff\xfe"])
def test_what_is_no_card_is_said_in_one_line(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "quality.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is no quality card.*appliance evaluate"):
        read_card(path)


def test_a_later_schema_is_refused_by_number(tmp_path: Path) -> None:
    path = tmp_path / "quality.json"
    path.write_bytes(b'{"schema": 3, "new": []}')
    with pytest.raises(CheckpointError, match="schema 3"):
        read_card(path)


def test_a_card_of_the_first_schema_is_read_and_says_what_its_errors_are(tmp_path: Path) -> None:
    path = tmp_path / "quality.json"
    first = json.loads(to_json(replace(make_card(), schema=1)))
    del first["kinds"], first["calls"]
    path.write_text(json.dumps(first))
    card = read_card(path)
    assert card is not None
    assert (card.kinds, card.calls) == ((), None)
    assert "one standard error over tokens" in to_markdown(card)
    assert "Kinds of text" not in to_markdown(card)
    assert "one standard error over windows" in to_markdown(make_card())


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        (ToolCalls(10, True, 8, 7, 6), "8 of 10 right before and 7 after, 6 the same in both"),
        (ToolCalls(10, False, 0, 0, 0), "the base gets none of 10 right, so nothing can be lost"),
        (ToolCalls(0, reason="it does not fit"), "not asked for: it does not fit"),
    ],
)
def test_calls_are_said_beside_those_of_the_base(calls: ToolCalls, said: str) -> None:
    assert said in to_markdown(replace(make_card(), calls=calls))


def test_a_card_belongs_to_its_weights(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"w" * 300_000)
    assert card_of(tmp_path) is None
    card = make_card(fingerprint=weights_fingerprint(tmp_path))
    card_path(tmp_path).write_bytes(to_json(card))
    assert card_of(tmp_path) == card
    weights.write_bytes(b"w" * 299_999 + b"v")
    with pytest.raises(CheckpointError, match="made of other weights"):
        card_of(tmp_path)


def test_a_file_has_its_card_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "model.Q4_1.gguf"
    file.touch()
    assert card_path(file) == tmp_path / "model.Q4_1.quality.json"


class Page(HTMLParser):
    """Checks that tags are closed in order, and records them."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.attributes += attrs


@pytest.mark.parametrize("card", [make_card(), lone_card()], ids=["whole", "alone"])
def test_the_page_is_whole_and_asks_for_nothing(card: Card) -> None:
    page, text = Page(), to_html(card)
    page.feed(text)
    assert page.open == []
    assert page.seen.isdisjoint({"script", "link", "img", "iframe", "object"})
    assert not {name for name, _ in page.attributes} & {"src", "href", "onload"}
    assert not re.search(r"https?:|url\(|@import", text)
    assert "prefers-color-scheme: dark" in text
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(drawing)
        assert "nan" not in drawing
    assert len(re.findall("<svg", text)) == (3 if card.comparison else 0)


def test_names_are_text_and_no_markup() -> None:
    text = to_html(make_card(name="<script>alert(1)</script>"))
    assert "<script>" not in text
    assert "tiny &lt;16&gt;" in text
    assert "some \\| text" in to_markdown(make_card())


def test_markdown_tables_have_as_many_cells_in_every_line() -> None:
    text = to_markdown(make_card())
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        counts = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(counts) == 1, table
    assert "0.25000 \u00b1 0.01000" in text
    assert "int4 (its own)" in text


@pytest.mark.parametrize("card", [make_card(), lone_card()], ids=["whole", "alone"])
def test_a_terminal_shows_it_within_its_width(card: Card) -> None:
    console = Console(width=110, record=True, file=StringIO())
    print_card(card, console)
    text = console.export_text()
    assert "quality of tiny-W4" in text
    assert max(map(len, text.splitlines())) <= 110


def test_bars_are_as_long_as_their_share() -> None:
    assert [bar(share, 4) for share in (0, 0.5, 1, 2)] == [
        "",
        "\u2588\u2588",
        "\u2588" * 4,
        "\u2588" * 4,
    ]
    assert bar(1 / 32, 4) == "\u258f"
