"""Real pictures, and transformers' processors without resizing."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs.fetched import pictures


@pytest.fixture(scope="session")
def photographs() -> Path:
    return pictures()
