"""Scripted answers of an echo engine, for tests that need a model to say something.

A script is a JSON file with a list of rules. The first rule whose `contains` are all in the prompt,
and whose `lacks` are not, gives the answer:

    [{"contains": ["Mend the file"], "lacks": ["mended"], "says": "<tool_call>..."}]
"""

from __future__ import annotations

from pathlib import Path

import msgspec


class Rule(msgspec.Struct, forbid_unknown_fields=True):
    """An answer, and the prompts that get it."""

    says: str
    contains: list[str] = []
    lacks: list[str] = []

    def fits(self, prompt: str) -> bool:
        """Whether the rule applies to a prompt."""
        return all(text in prompt for text in self.contains) and not any(
            text in prompt for text in self.lacks
        )


class Script:
    """Rules for a tokenizer whose token n < 256 is byte n.

    Args:
        path: of the file; None: a script without rules.
    """

    def __init__(self, path: Path | None) -> None:
        content = b"[]" if path is None else path.read_bytes()
        self._rules = msgspec.json.decode(content, type=list[Rule])

    def tokens(self, prompt: tuple[int, ...], end: int) -> tuple[int, ...]:
        """The answer to a prompt, its end included; the prompt itself if no rule fits.

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
