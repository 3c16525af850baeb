from __future__ import annotations

import gc

from appliance.runtime import settle


def test_what_is_there_is_kept_from_the_collector() -> None:
    try:
        settle()
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()
