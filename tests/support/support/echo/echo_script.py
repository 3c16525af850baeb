"""What an echo says instead: a model of tests that knows its lines.

It is a file of JSON, a list of rules. The first rule whose texts are all in a prompt, and none of
those it must lack, gives the answer:

    [{"contains": ["Mend the file"], "lacks": ["mended"], "says": "<tool_call>..."}]
"""

from __future__ import annotations

from pathlib import Path

import msgspec


class Rule(msgspec.Struct, forbid_unknown_fields=True):
    """When to say something."""

    says: str
    contains: list[str] = []
    lacks: list[str] = []

    def fits(self, prompt: str) -> bool:
        """Whether it is for a prompt."""
        return all(text in prompt for text in self.contains) and not any(
            text in prompt for text in self.lacks
        )


class Script:
    """Rules for a tokenizer whose token n < 256 is byte n.

    Args:
        path: of the file; None knows no lines.
    """

    def __init__(self, path: Path | None) -> None:
        content = b"[]" if path is None else path.read_bytes()
        self._rules = msgspec.json.decode(content, type=list[Rule])

    def tokens(self, prompt: tuple[int, ...], end: int) -> tuple[int, ...]:
        """What is to be said after a prompt, the end included; the prompt itself, if no rule fits.

        Args:
            prompt: token ids.
            end: the token that ends an answer.
        """
        if not self._rules:
            return prompt
        text = bytes(token for token in prompt if token < 256).decode(errors="ignore")
        for rule in self._rules:
            if rule.fits(text):
                return (*rule.says.encode(), end)
        return prompt
