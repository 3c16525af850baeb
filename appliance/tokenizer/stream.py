"""Token ids to text while they arrive."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from appliance.tokenizer.tokenizer import Tokenizer


class DecodeStream:
    """The text of one growing answer. Control tokens are skipped.

    Works on the bytes of the tokens: a character that is spread over several tokens comes out when
    its last byte is there, and never as halves. Most tokens are whole characters, and between
    characters the text of these is known beforehand.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._visible_bytes = tokenizer.visible_bytes
        self._whole_text = tokenizer.whole_text
        self._begun = b""  # a character that is not complete

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens; returns the characters that they complete."""
        text = ""
        for token_id in token_ids:
            whole = None if self._begun else self._whole_text[token_id]
            text += self._decode(token_id) if whole is None else whole
        return text

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that never became complete."""
        text, _ = codecs.utf_8_decode(self._begun, "replace", True)
        self._begun = b""
        return text

    def _decode(self, token_id: int) -> str:
        data = self._begun + self._visible_bytes(token_id)
        text, length = codecs.utf_8_decode(data, "replace", False)
        self._begun = data[length:]
        return text
