"""Entry of `python -m appliance.engine.process`, which the supervisor starts."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from typing import TYPE_CHECKING

from appliance.engine.process.worker import run_engine_process

if TYPE_CHECKING:
    from appliance.engine.process.worker import LoadEngine


def find_loader() -> LoadEngine:
    """Import the loader, and with it the engine."""
    from appliance.engine.load.load_engine import load_engine

    return load_engine


if __name__ == "__main__":
    try:
        exit_code = run_engine_process(sys.argv[1:], find_loader)
    except Exception:
        traceback.print_exc()
        exit_code = 1
    logging.shutdown()
    # All work is done; tearing torch down would delay the exit by a second or more.
    os._exit(exit_code)
