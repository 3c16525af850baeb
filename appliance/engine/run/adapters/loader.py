"""Reads and lays out adapters in a thread beside the steps, one at a time."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.config.values import named_paths
from appliance.engine.nouns.request import AdapterRef
from appliance.errors import AdapterError
from appliance.files import stamp_of

if TYPE_CHECKING:
    from appliance.config import EngineConfig
    from appliance.model.adapters.adapter import AdapterSlots, LaidOut
    from appliance.model.executor import Executor
    from appliance.model.source import ModelSource

MOST_PARTS = 4  # parts of one linear, whose shrunk rows lie side by side

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter ready for a slot.

    Attributes:
        rank: the largest of its ranks.
        seconds: time to read it.
    """

    digest: str
    laid_out: LaidOut
    rank: int
    notes: tuple[str, ...]
    seconds: float


class AdapterLoader:
    """A thread that reads adapters.

    Args:
        most_ranks: maximum rank of a linear.
    """

    def __init__(self, base: ModelSource, slots: AdapterSlots, count: int, most_ranks: int) -> None:
        self.slots = slots
        self.count = count
        self._base = base
        self._most_ranks = most_ranks
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapter")

    @classmethod
    def of(
        cls, config: EngineConfig, source: ModelSource, executor: Executor[Any]
    ) -> AdapterLoader | None:
        """Make room for the adapters that the settings allow; None if they allow none."""
        if not wants_adapters(config):
            return None
        from appliance.model.adapters.targets import adapter_targets

        targets = adapter_targets(source.spec, source.family.names)
        slots = executor.adapter_slots(targets, config.max_loras, config.max_lora_rank)
        return cls(source, slots, config.max_loras, config.max_lora_rank)

    def load(self, ref: AdapterRef) -> LoadedAdapter:
        """Read an adapter in the calling thread.

        Raises:
            AdapterError: the adapter is unusable, or changes during the read.
            MemoryError: the system has too little memory.
        """
        from appliance.model.adapters.reader import read_adapter

        begin = time.perf_counter()
        path = Path(ref.path)
        adapter = read_adapter(path, self._base, self._most_ranks)
        if stamp_of(path) != ref.stamp:
            raise AdapterError(f"{path} has changed while it was read; ask again")
        laid_out = self.slots.lay_out(adapter)
        seconds = time.perf_counter() - begin
        logger.info("loaded adapter %s in %.3f s", ref.name, seconds)
        for note in adapter.notes:
            logger.warning("adapter %s: %s", ref.name, note)
        return LoadedAdapter(adapter.digest, laid_out, adapter.rank, adapter.notes, seconds)

    def begin(self, ref: AdapterRef) -> Future[LoadedAdapter]:
        """Read an adapter in the loader's thread while steps run."""
        return self._thread.submit(self.load, ref)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def wants_adapters(config: EngineConfig) -> bool:
    return bool(config.lora or config.lora_dir)


def planned_bytes(
    config: EngineConfig, source: ModelSource, element_bytes: int, *, in_table: bool
) -> int:
    """Return the bytes of all slots, of one adapter being read, and of shrunk rows.

    Args:
        in_table: each slot has room for the maximum rank, and shrunk rows are sums of parts.
    """
    if not wants_adapters(config):
        return 0
    from appliance.kernels.adapters.factors import padded_rank
    from appliance.kernels.adapters.variant import MOST_SPLITS
    from appliance.model.adapters.factors import RANKS_AT_ONCE
    from appliance.model.adapters.targets import adapter_bytes

    rank = config.max_lora_rank
    rank = padded_rank(rank) if in_table else -(-rank // RANKS_AT_ONCE) * RANKS_AT_ONCE
    weights = source.weights

    def bytes_beside(weight: str) -> int:
        is_packed = weights.packed_bits(weight) is not None or weights.float_bits(weight) == 4
        is_packed = is_packed and not source.is_trellis  # whose inputs are rotated
        return 1 if is_packed and not in_table else element_bytes

    each = adapter_bytes(source.spec, source.family.names, rank, bytes_beside)
    shrunk = config.max_num_batched_tokens * MOST_PARTS * rank * 4
    shrunk *= MOST_SPLITS if in_table else 1
    return (config.max_loras + 1) * each + shrunk


def configured_adapters(config: EngineConfig) -> list[AdapterRef]:
    """Return the adapters in the settings.

    Raises:
        AdapterError: an adapter is missing.
    """
    refs = []
    for name, path in named_paths(config.lora, "lora").items():
        stamp = stamp_of(Path(path))
        if not stamp:
            raise AdapterError(f"the adapter {name!r} is not at {path}; give a folder or file")
        refs.append(AdapterRef(name, str(Path(path).absolute()), stamp))
    return refs
