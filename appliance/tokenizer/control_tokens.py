"""Finds control tokens in text, and keeps users' text from becoming one.

A chat is rendered to one text before tokenizing, because tokens may span template and content. So
that content cannot end its own turn, an unguessable placeholder replaces text that looks like a
control token during rendering; afterwards the text returns as plain text.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

_IDENTIFIER = re.compile(r"[A-Za-z0-9_-]*")


class Occurrence(NamedTuple):
    """A control token in a text: characters start to end, including spaces that belong to it."""

    start: int
    end: int
    token_id: int


class ControlTokens:
    """All control tokens of a vocabulary.

    Args:
        tokens: by id, with their rules for neighbouring spaces.
    """

    def __init__(self, tokens: Mapping[int, AddedToken]) -> None:
        # A tokenizer with only these tokens finds them by the full one's rules.
        self._finder = Tokenizer(WordLevel({"\0": 0}, unk_token="\0"))
        self._finder.add_special_tokens(list(tokens.values()))
        self._ids = {token.content: token_id for token_id, token in tokens.items()}
        self._id_of = {
            finder_id: self._ids[token.content]
            for finder_id, token in self._finder.get_added_tokens_decoder().items()
        }
        self._openings = tuple({content[:2] for content in self._ids})
        self._sorted = sorted(self._ids)
        self._sorted_backwards = sorted(content[::-1] for content in self._ids)
        self._longest = max(map(len, self._ids), default=0)

    def find(self, text: str) -> list[Occurrence]:
        if not any(opening in text for opening in self._openings):
            return []
        # Batches, even of one, release the GIL; a single text does not.
        (encoding,) = self._finder.encode_batch([text], add_special_tokens=False)
        return [
            Occurrence(start, end, self._id_of[finder_id])
            for finder_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
            if finder_id in self._id_of
        ]

    def length_begun(self, text: str) -> int:
        """Count the characters at the text's end that could begin a control token."""
        return self._partial_length(text[-self._longest - 1 :], self._sorted)

    def length_ended(self, text: str) -> int:
        """Count the characters at the text's start that could end a control token."""
        return self._partial_length(text[: self._longest][::-1], self._sorted_backwards)

    def _partial_length(self, text: str, contents: list[str]) -> int:
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            part = text[-length:]
            at = bisect_left(contents, part)
            if at < len(contents) and contents[at].startswith(part):
                return length
        return 0


class ContentGuard:
    """Hides control tokens in messages while the template is rendered."""

    def __init__(self, control_tokens: ControlTokens) -> None:
        self._control_tokens = control_tokens
        self._nonce = f"Z{secrets.token_hex(8)}x"
        self._hidden: list[str] = []

    def hide(self, value: Any) -> Any:
        """Copy messages or tools so that no string contains, begins or ends a control token."""
        if isinstance(value, str):
            return self._hide_text(value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item) for item in value]
        return value

    def restore(self, text: str) -> str:
        if not self._hidden:
            return text
        return re.sub(self._nonce + r"(\d+)Z", lambda match: self._hidden[int(match[1])], text)

    def _hide_text(self, text: str) -> str:
        parts: list[str] = []
        position = 0
        for start, end, _ in self._control_tokens.find(text):
            parts += [text[position:start], self._placeholder(text[start:end])]
            position = end
        parts.append(text[position:])
        # Words such as a role stay whole: templates compare them and build control tokens from
        # them.
        if _IDENTIFIER.fullmatch(text):
            return "".join(parts)
        if begun := self._control_tokens.length_begun(parts[-1]):
            parts[-1:] = [parts[-1][:-begun], self._placeholder(parts[-1][-begun:])]
        if ended := self._control_tokens.length_ended(parts[0]):
            parts[:1] = [self._placeholder(parts[0][:ended]), parts[0][ended:]]
        return "".join(parts)

    def _placeholder(self, text: str) -> str:
        self._hidden.append(text)
        return f"{self._nonce}{len(self._hidden) - 1}Z"
