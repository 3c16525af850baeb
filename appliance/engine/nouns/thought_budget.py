"""A limit on the thinking at the start of an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence


class ThoughtBudget(msgspec.Struct, frozen=True, array_like=True):
    """Limits an answer's thinking; forces the closing mark after that.

    Args:
        tokens: number of the answer's first tokens.
        opening: ids that begin a thought; empty if the prompt has begun it.
        closing: ids that end it.
    """

    tokens: int
    opening: tuple[int, ...]
    closing: tuple[int, ...]

    def forces(self, output: Sequence[int], num_output_tokens: int) -> int | None:
        """Return the forced next token, or None.

        Ignores the budget's last token, which a device may not have returned yet. So a thought that
        ends just in time has its mark twice.

        Args:
            output: the answer's known tokens.
            num_output_tokens: their number, unknown ones included.
        """
        place = num_output_tokens - self.tokens
        if not 0 <= place < len(self.closing):
            return None
        seen = tuple(output[: max(0, self.tokens - 1)])
        if _find(seen, self.closing) or not _find(seen, self.opening):
            return None
        return self.closing[place]


def _find(tokens: tuple[int, ...], part: tuple[int, ...]) -> bool:
    """Return True if some tokens contain others consecutively."""
    starts = range(len(tokens) - len(part) + 1)
    return not part or any(tokens[start : start + len(part)] == part for start in starts)
