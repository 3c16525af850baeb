"""Prompts of random tokens, or of an exact number of them."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING

from appliance.bench.serving import WORDS

if TYPE_CHECKING:
    from appliance.tokenizer import Tokenizer


def random_tokens(count: int, chance: random.Random, vocab_size: int = 40_000) -> list[int]:
    """Draw token ids above the lowest, where special ones are."""
    return chance.choices(range(min(1000, vocab_size // 4), vocab_size), k=count)


class ExactPrompts:
    """Prompts of an exact number of tokens, no two of which begin with the same token.

    So no prefix cache can help. The same seed gives the same prompts in the same order.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int = 0) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        texts = map(tokenizer.token_text, range(tokenizer.vocab_size))
        starts = [text for text in texts if re.fullmatch("[A-Z][a-z]{3,}", text)]
        self._random.shuffle(starts)
        self._starts = iter(starts)

    def next(self, tokens: int) -> str:
        """Return the next prompt of that many tokens, BOS included where the model wants one."""
        text = next(self._starts)
        while (missing := tokens - self._count(text)) > 0:
            text += "".join(f" {word}" for word in self._random.choices(WORDS, k=missing))
            while self._count(text) > tokens:
                text = text.rpartition(" ")[0]
        return text

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=True))
