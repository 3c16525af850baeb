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
    ranks: Annotated[
        int,
        Setting(
            "Processes that divide the model. Each has a share of every layer, as with"
            " tensor_parallel, or whole layers, as with pipeline_parallel: these where the"
            " link that is measured at the start is slow.",
            Group.COMPUTE,
            low=1,
            high=64,
        ),
    ] = 1
    tensor_parallel: Annotated[
        int,
        Setting(
            "Processes that divide each layer among them. A slow link gives each whole layers"
            " instead.",
            Group.COMPUTE,
            low=1,
            high=64,
        ),
    ] = 1
    pipeline_parallel: Annotated[
        int,
        Setting(
            "Processes that each have a run of whole layers, through which the rows of a step go in"
            " micro-batches.",
            Group.COMPUTE,
            low=1,
            high=64,
        ),
    ] = 1
    gpu_split: Annotated[
        str,
        Setting(
            "Share of the model for each process, such as 2:1; auto divides evenly, unless other"
            " shares are clearly faster by what each process reads per second.",
            Group.COMPUTE,
        ),
    ] = "auto"

    @property
    def is_divided(self) -> bool:
        """True if several processes share one model."""
        return self.num_ranks > 1 or self.gpu_split not in ("auto", "1")

    @property
    def num_ranks(self) -> int:
        """Processes for one copy of the model."""
        return self.ranks * self.tensor_parallel * self.pipeline_parallel

    @property
    def ranks_settings(self) -> tuple[str, ...]:
        """The settings that ask for these processes, with their values."""
        counts = {
            "--ranks": self.ranks,
            "--tensor-parallel": self.tensor_parallel,
            "--pipeline-parallel": self.pipeline_parallel,
        }
        return tuple(f"{name} {count}" for name, count in counts.items() if count > 1)

    @property
    def ranks_setting(self) -> str:
        """The only one of these; without any the one that means a single process."""
        return self.ranks_settings[0] if self.ranks_settings else "--ranks 1"
