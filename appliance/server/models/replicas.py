"""Makes a model's engine: one process, or several that divide threads, memory and GPUs.

Several processes are tested on CPUs only, not yet on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from appliance.engine.process.client import EngineClient
from appliance.engine.process.replica_set import ReplicaSet, ServedEngine
from appliance.engine.process.residency import Residency
from appliance.errors import ConfigError
from appliance.kernels.gpu.cards import usable_cards
from appliance.runtime import free_host_bytes, visible_gpus
from appliance.wording import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.config import EngineConfig
    from appliance.engine.process.client import Replica

MakeClient = Callable[..., EngineClient]


class Memories:
    """The memory of the host, and of each GPU that a replica has alone.

    Args:
        limit: bytes of all engines together in each of them; None means the free memory.
        is_shared: there are several models.
    """

    def __init__(self, limit: int | None, *, is_shared: bool) -> None:
        self._limit = limit
        self._is_shared = is_shared
        self._residencies: dict[str, Residency] = {}

    def of(self, gpu: str, *, divided: bool = False) -> Residency:
        """Return the memory of a GPU; "" is the place of engines without their own GPU.

        Args:
            divided: replicas divide it, so it needs a limit before the first one measures.
        """
        found = self._residencies.get(gpu)
        if found is None:
            found = Residency(self._limit, is_shared=self._is_shared)
            self._residencies[gpu] = found
        if divided:
            found.is_shared = True
            if found.limit is None:
                found.limit = free_host_bytes()
        return found


def make_engine(
    config: EngineConfig,
    memories: Memories,
    make: MakeClient,
    gpus: Sequence[str] | None = None,
) -> ServedEngine:
    """Make a model's engine from its settings.

    Args:
        make: makes a client from its settings, its memory, its number and the shared state.
        gpus: ids of the present GPUs; None finds them.

    Raises:
        ConfigError: the machine has too few GPUs or threads for the replicas.
    """
    if config.replicas == 1:
        return make(config, memories.of(""), 0, None)
    own = _own_gpus(config, gpus)
    configs = [config] * config.replicas if own else divided(config)
    places = own or [""] * config.replicas

    def make_one(place: int, replica: Replica) -> EngineClient:
        memory = memories.of(places[place], divided=not own)
        return make(configs[place], memory, place, replica)

    return ReplicaSet(places, make_one)


def divided(config: EngineConfig) -> list[EngineConfig]:
    """Divide the CPU threads among the replicas.

    Raises:
        ConfigError: there are fewer threads than processes.
    """
    import psutil  # needed only here

    threads = config.threads or psutil.cpu_count(logical=False) or 1
    number, each = config.replicas, config.num_ranks
    if threads < number * each:
        most = threads // each
        valid = f"--replicas {most}" if most else f"{config.ranks_setting.split()[0]} 1"
        where = "--threads gives" if config.threads else "this machine has"
        raise ConfigError(
            f"--replicas {number}"
            + (f" with {config.ranks_setting}" if each > 1 else "")
            + f" needs a CPU thread for each process, and {where} {threads}; use {valid}"
            " or less, or more --threads"
        )
    shares = [threads // number + (place < threads % number) for place in range(number)]
    return [msgspec.structs.replace(config, threads=share) for share in shares]


def _own_gpus(config: EngineConfig, gpus: Sequence[str] | None) -> list[str]:
    """Return a GPU for each replica; none on a CPU.

    Raises:
        ConfigError: there are too few.
    """
    if config.device == "cpu":
        return []
    found = gpu_ids() if gpus is None else gpus
    if not found and config.device == "auto":
        return []
    each = config.num_ranks
    if len(found) < config.replicas * each:
        most = len(found) // each
        valid = f"--replicas {most}, or " if most else ""
        raise ConfigError(
            f"--replicas {config.replicas}"
            + (f" with {config.ranks_setting}" if each > 1 else "")
            + f" needs {counted(config.replicas * each, 'GPU')}, and this machine has"
            f" {len(found)}; use {valid}--device cpu"
        )
    return [",".join(found[n * each : (n + 1) * each]) for n in range(config.replicas)]


def gpu_ids() -> list[str]:
    """Return the ids of the GPUs that a replica may have: CUDA_VISIBLE_DEVICES's, or all."""
    given = visible_gpus()
    return [card.uuid for card in usable_cards()] if given is None else given
