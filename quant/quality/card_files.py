"""Writes a card beside the weights: JSON, Markdown and HTML."""

from __future__ import annotations

from pathlib import Path

from appliance.errors import QuantizeError
from appliance.files import replace_atomically
from appliance.quant.quality.card import (
    HTML_NAME,
    MARKDOWN_NAME,
    Card,
    beside,
    card_path,
    to_json,
)
from appliance.quant.quality.card_html import to_html
from appliance.quant.quality.card_rows import to_markdown


def write_card(card: Card, model: Path, out: Path | None = None) -> Path:
    """Write JSON, Markdown and HTML atomically; return the path of the JSON.

    Raises:
        QuantizeError: the files cannot be written.
    """
    path = card_path(model) if out is None else out / card_path(model).name
    contents = {
        path: to_json(card),
        path.with_name(beside(model, MARKDOWN_NAME).name): to_markdown(card).encode(),
        path.with_name(beside(model, HTML_NAME).name): to_html(card).encode(),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for file, content in contents.items():
            with replace_atomically(file) as temporary:
                temporary.write_bytes(content)
    except OSError as error:
        raise QuantizeError(
            f"cannot write the card to {path.parent}: {error.strerror}; name another folder"
            " with --out"
        ) from error
    return path
