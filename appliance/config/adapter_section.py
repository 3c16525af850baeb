"""Settings of adapters, part of the engine's section."""

from __future__ import annotations

from typing import Annotated

from appliance.config.parallel_section import ParallelConfig
from appliance.config.setting import Group, Setting


class AdapterConfig(ParallelConfig, frozen=True, kw_only=True):
    """Adapters that requests may name, and the number kept in memory."""

    lora: Annotated[
        str,
        Setting(
            "Adapters to load, NAME=PATH, separated by commas; requests name one as their model.",
            Group.MODEL,
            default_is="none",
        ),
    ] = ""
    lora_dir: Annotated[
        str | None,
        Setting(
            "Folder of adapters, each loaded when a request names it as its model.",
            Group.MODEL,
        ),
    ] = None
    max_loras: Annotated[
        int, Setting("Adapters in memory, which one step may mix.", Group.MODEL, low=1, high=1024)
    ] = 8
    max_lora_rank: Annotated[
        int, Setting("Largest rank of an adapter.", Group.MODEL, low=1, high=512)
    ] = 32
