"""Settings of real models: opened in their real widths, and scaled down against transformers.

`scripts/real_headers` tries whole folders of headers in the same two ways; `real_settings.json` has
a header of each kind, reduced to settings (written by its option --reduce).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.models.real_headers.header import Header
from support.models.real_headers.refusals import is_right
from support.models.real_headers.settings import read_settings
from support.models.real_headers.trial import Outcome, try_small, try_whole

HEADERS = list(read_settings(Path(__file__).parent / "real_settings.json"))


def assert_right(header: Header, outcome: Outcome) -> None:
    is_rightly_refused = outcome.state == "refused" and is_right(header, outcome.reason)
    assert outcome.state == "ok" or is_rightly_refused, str(outcome)


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: header.name)
def test_opens_in_its_real_widths(header: Header, tmp_path: Path) -> None:
    assert_right(header, try_whole(header, tmp_path))


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: header.name)
def test_scaled_down_gives_the_logits_of_transformers(header: Header, tmp_path: Path) -> None:
    assert_right(header, try_small(header, tmp_path))
