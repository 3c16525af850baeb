"""Converts token ids to text as they arrive."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from appliance.tokenizer.tokenizer import Tokenizer


class DecodeStream:
    """Decodes one growing answer. Skips control tokens, except those in `shown`.

    Works on bytes: emits a character that spans several tokens when its last byte arrives. Caches
    the text of tokens that are whole characters, as most are.

    Args:
        shown: control tokens to emit as text.
    """

    def __init__(self, tokenizer: Tokenizer, shown: frozenset[int] = frozenset()) -> None:
        self._visible_bytes = tokenizer.visible_bytes
        self._whole_text = tokenizer.whole_text
        self._shown = {token_id: tokenizer.token_bytes(token_id) for token_id in shown}
        self._begun = b""  # an incomplete character

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens; return the characters they complete."""
        text = ""
        for token_id in token_ids:
            known = not self._begun and token_id not in self._shown
            whole = self._whole_text[token_id] if known else None
            text += self._decode(token_id) if whole is None else whole
        return text

    def flush(self) -> str:
        """Return the rest at the end: U+FFFD for an incomplete character."""
        text, _ = codecs.utf_8_decode(self._begun, "replace", True)
        self._begun = b""
        return text

    def _decode(self, token_id: int) -> str:
        added = self._shown.get(token_id)
        data = self._begun + (self._visible_bytes(token_id) if added is None else added)
        text, length = codecs.utf_8_decode(data, "replace", False)
        self._begun = data[length:]
        return text
