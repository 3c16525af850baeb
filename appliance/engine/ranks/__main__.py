"""Entry of `python -m appliance.engine.ranks`, which rank 0 starts."""

from __future__ import annotations

import logging
import os
import sys

from appliance.engine.ranks.member import run_member

if __name__ == "__main__":
    exit_code = run_member(sys.argv[1:])
    logging.shutdown()
    os._exit(exit_code)
