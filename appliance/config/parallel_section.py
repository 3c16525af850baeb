"""The settings of several ranks, which are part of the engine's section."""

from __future__ import annotations

from typing import Annotated

import msgspec

from appliance.config.setting import Group, Setting


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The processes that share a model, and each one's share of it."""

    tensor_parallel: Annotated[
        int,
        Setting(
            "Processes that divide each layer among them.",
            Group.COMPUTE,
            low=1,
            high=64,
        ),
    ] = 1
    gpu_split: Annotated[
        str,
        Setting(
            "Share of the model that each of them has, such as 2:1; auto is as even as can be.",
            Group.COMPUTE,
        ),
    ] = "auto"
