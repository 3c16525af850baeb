"""No configuration except the test's own."""

from __future__ import annotations

import pytest
from support.runs.own_config import clean_environment, write_config

__all__ = ["clean_environment", "write_config"]


@pytest.fixture(autouse=True)
def _own_configuration(clean_environment: None) -> None:
    pass
