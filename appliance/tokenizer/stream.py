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
    its last byte is there, and never as halves.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._visible_bytes = tokenizer.visible_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens; returns the characters that they complete."""
        return self._utf8.decode(b"".join(map(self._visible_bytes, token_ids)))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that never became complete."""
        return self._utf8.decode(b"", final=True)
