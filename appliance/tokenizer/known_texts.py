"""Caches token ids of recent texts, because clients resend a conversation with every turn."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

MAX_CHARACTERS = 4 << 20  # total; with their ids, 10 to 30 MB


class KnownTexts:
    """An LRU cache of texts and their ids. Thread-safe.

    Args:
        encode: returns the ids of each text in a list.
        max_characters: of all cached texts.
    """

    def __init__(
        self,
        encode: Callable[[Sequence[str]], list[list[int]]],
        max_characters: int = MAX_CHARACTERS,
    ) -> None:
        self._encode = encode
        self._max_characters = max_characters
        self._characters = 0
        self._known: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def ids_of(self, texts: Sequence[str], salt: str = "") -> list[Sequence[int]]:
        """Return the ids of each text.

        Args:
            texts: encodes the uncached ones together.
            salt: separates callers, so that none can learn another's texts from timing.
        """
        found: dict[str, Sequence[int]] = {}
        with self._lock:
            for text in texts:
                if (ids := self._known.get((salt, text))) is not None:
                    self._known.move_to_end((salt, text))
                    found[text] = ids
        new = [text for text in dict.fromkeys(texts) if text not in found]
        if new:
            encoded = [array("I", ids) for ids in self._encode(new)]
            found |= dict(zip(new, encoded, strict=True))
            with self._lock:
                for text, ids in zip(new, encoded, strict=True):
                    self._keep(text, salt, ids)
        return [found[text] for text in texts]

    def _keep(self, text: str, salt: str, ids: array[int]) -> None:
        if (salt, text) in self._known:  # another thread added it meanwhile
            return
        self._known[salt, text] = ids
        self._characters += len(text)
        while self._characters > self._max_characters:
            (_, oldest), _ = self._known.popitem(last=False)
            self._characters -= len(oldest)
