"""Samples of what is too much for each run: another one in each commit, all in time."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import TypeVar

Key = TypeVar("Key")


def sample(keys: list[Key], one_in: int, seed: str) -> list[Key]:
    """Return about one key of so many, never none: others with another seed, all with 1."""

    def rank(key: Key) -> int:
        return int.from_bytes(hashlib.sha256(f"{seed} {key}".encode()).digest()[:8], "big")

    first = min(keys, key=rank)
    return [key for key in keys if key == first or rank(key) % one_in == 0]


def seed_of_tree() -> str:
    """Return git's hash of the last commit's files, so that each commit has a sample of its own."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD^{tree}"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()
