"""Settings of several processes for one model, part of the engine's section."""

from __future__ import annotations

from typing import Annotated

import msgspec

from appliance.config.setting import Group, Setting


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Processes that serve a model: replicas, and ranks that divide one model."""

    replicas: Annotated[
        int,
        Setting(
            "Engine processes that each serve the whole model behind one port. On a CPU they divide"
            " the threads and the free memory; on GPUs each has one. All other settings, such as"
            " kv_cache_memory and max_num_seqs, apply to each replica.",
            Group.COMPUTE,
            low=1,
            high=64,
        ),
    ] = 1
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
            "Share of the model for each process, such as 2:1; auto divides evenly.",
            Group.COMPUTE,
        ),
    ] = "auto"

    @property
    def is_divided(self) -> bool:
        """True if several processes share one model."""
        return self.tensor_parallel > 1 or self.gpu_split not in ("auto", "1")
