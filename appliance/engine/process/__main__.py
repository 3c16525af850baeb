"""`python -m appliance.engine.process`: what the supervisor starts; not for people."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING

from appliance.engine.process.entry import run_engine_process

if TYPE_CHECKING:
    from appliance.engine.process.worker import LoadEngine


def find_loader() -> LoadEngine:
    """The one import that loads torch."""
    from appliance.engine.engine import LLMEngine

    return LLMEngine.load


if __name__ == "__main__":
    exit_code = run_engine_process(sys.argv[1:], find_loader)
    logging.shutdown()
    # Everything is done; taking torch apart would keep the server waiting for a second or more.
    os._exit(exit_code)
