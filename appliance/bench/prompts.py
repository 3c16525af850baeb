"""Prompts of random words."""

from __future__ import annotations

import random

WORDS = [
    *("river", "stone", "market", "letter", "garden", "winter", "signal", "harbor", "engine"),
    *("window", "captain", "forest", "bridge", "silver", "morning", "question", "village"),
    *("hammer", "teacher", "mountain", "copper", "shadow", "kitchen", "orange", "paper"),
]


def prompt_of(words: int, shared_words: int, seed: int) -> str:
    """Return a prompt with a shared beginning, like a system prompt."""
    shared = random.Random(0).choices(WORDS, k=shared_words)
    return " ".join(shared + random.Random(seed + 1).choices(WORDS, k=words))
