"""The server's last line: totals served, and bytes left on disk."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.commands.examples import own_command

if TYPE_CHECKING:
    from appliance.config import EngineConfig


STOPPED = "stopped; "  # prefix of the line


def parting(num_requests: int, config: EngineConfig) -> str:
    served = f"{num_requests:,} request{'' if num_requests == 1 else 's'} served"
    return f"{STOPPED}{served}; {_kept(config)}"


def _kept(config: EngineConfig) -> str:
    from appliance.config import kv_dir
    from appliance.engine.tiers.stored_models import stored_models

    nothing = "nothing is kept on disk"
    if config.kv_disk in ("auto", "off"):
        return nothing
    root = Path(config.kv_disk).expanduser()
    num_bytes = sum(model.num_bytes for model in stored_models(root))
    if not num_bytes:
        return nothing
    option = "" if root == kv_dir() else f" --kv-disk {shlex.quote(str(root))}"
    return (
        f"{num_bytes / 2**20:,.1f} MiB of prompts and answers are kept in {root} for the next start"
        f" ({own_command()} cache ls{option})"
    )
