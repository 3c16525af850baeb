"""Sets up the blocks of a KV cache and the tiers below.

Notes a tier that fails, and continues without it.
"""

from __future__ import annotations

import hashlib
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.engine.blocks.block_manager import BlockManager
from appliance.engine.blocks.block_metadata import BlockMetadata
from appliance.engine.blocks.state_slots import StateSlots
from appliance.engine.tiers.disk_store import DiskStore
from appliance.engine.tiers.disk_tier import DiskTier
from appliance.engine.tiers.tiers import Tiers, TierSizes
from appliance.engine.tiers.write_behind import ON_DISK, WriteBehind
from appliance.model_files.gguf_names import is_gguf, parts_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.config import EngineConfig
    from appliance.engine.devices import Precision
    from appliance.engine.load.memory_request import ModelMemory
    from appliance.engine.load.runner import LoadedRunner
    from appliance.engine.nouns.messages import EngineInfo
    from appliance.engine.nouns.moves import Rates
    from appliance.model.source import ModelSource


logger = logging.getLogger(__name__)


def make_kv_cache(
    config: EngineConfig,
    source: ModelSource,
    memory: ModelMemory,
    loaded: LoadedRunner,
    metadata: memoryview | None,
    rates: Rates,
    info: EngineInfo,
    precision: Precision,
) -> tuple[BlockManager, Tiers, tuple[str, ...]]:
    """Set up the blocks of an allocated cache, and host memory and disk below.

    Args:
        metadata: memory for block metadata; None keeps it private.

    Returns:
        Blocks, tiers, and notes for the user.
    """
    plan, slots = memory.plan, memory.plan.states
    blocks = BlockManager(
        plan.num_blocks,
        plan.block_size,
        metadata=BlockMetadata(metadata, num_blocks=plan.num_blocks),
        prefix_caching=config.prefix_caching,
        namespace=memory.request.kv_format,
        num_open=memory.num_open,
        states=StateSlots(slots.num_slots, slots.num_checkpoints, slots.row_bytes)
        if slots.row_bytes
        else None,
        holds_copies=source.spec.own_cache is not None,
    )
    tiers, notes = _load_tiers(config, blocks, loaded, rates, info, precision)
    return blocks, tiers, notes


def _load_tiers(
    config: EngineConfig,
    blocks: BlockManager,
    loaded: LoadedRunner,
    rates: Rates,
    info: EngineInfo,
    precision: Precision,
) -> tuple[Tiers, tuple[str, ...]]:
    moves, states = loaded.moves, loaded.states
    state_bytes = 0 if states is None else states.state_bytes
    sizes = TierSizes(
        moves.block_bytes,
        moves.open_bytes,
        loaded.plan.kv_host_bytes,
        keeps_evicted=loaded.moves_beside_steps and config.prefix_caching,
        state_bytes=state_bytes,
    )
    if config.kv_disk in ("auto", "off") or not config.prefix_caching:
        return Tiers(blocks, sizes, rates), ()
    about = {
        "model": info.model,
        "kv_format": info.kv_format,
        "block_size": info.block_size,
        "backend": info.backend,
        "made": time.time(),
    }
    root = Path(config.kv_disk).expanduser()
    fingerprint = kv_fingerprint(
        Path(config.model),
        info.fingerprint,
        precision,
        moves.block_bytes,
        () if states is None else states.part_bytes,
    )
    store = DiskStore(root, fingerprint, moves.block_bytes, config.kv_disk_size, about, state_bytes)
    try:
        store.open()
    except OSError as error:
        note = (
            f"prompts are not remembered over a restart: {root} cannot be used"
            f" ({error.strerror}); name another folder with --kv-disk"
        )
        logger.warning("%s", note)
        return Tiers(blocks, sizes, rates), (note,)
    disk = DiskTier(store)
    note = (
        f"kept on the disk: {ON_DISK}; in {root}, up to {config.kv_disk_size / 2**30:.1f} GiB,"
        f" {len(store):,} blocks of this model now; --kv-disk off keeps nothing, appliance cache rm"
        " removes it"
    )
    clock = time.thread_time if precision.device.type == "cpu" else time.perf_counter
    save_states = None if states is None else states.save
    writes = WriteBehind(blocks, disk, moves.save, clock, save_states)
    return Tiers(blocks, sizes, rates, disk, writes), (note,)


def kv_fingerprint(
    model: Path,
    fingerprint: str,
    precision: Precision,
    block_bytes: int,
    state_parts: tuple[int, ...] = (),
) -> bytes:
    """Hash everything except tokens that determines the bytes of a block or state: 16 bytes.

    A rewritten weight file counts as a new one, even with the same content.

    Args:
        model: file or folder.
        fingerprint: the engine's: version, weights, arithmetic, default format.
        block_bytes: of a block in all layers.
        state_parts: bytes of the parts of a recurrent state, of each rank with a device of its own.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{fingerprint} {block_bytes} {precision.block_size}".encode())
    if len(state_parts) > 1:
        digest.update(f"{state_parts}".encode())
    files: Sequence[Path] = parts_of(model)
    if model.is_dir():
        files = [one for one in sorted(model.iterdir()) if _is_of_model(one)]
    for file in files:
        if file.is_file():
            stat = file.stat()
            digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}".encode())
    for layer in precision.kv_layers:
        digest.update(layer.format.value.encode())
        for constant in (layer.head_scales, layer.key_mean):
            digest.update(b"-" if constant is None else constant.float().cpu().numpy().tobytes())
    return digest.digest()


def _is_of_model(file: Path) -> bool:
    return file.suffix in (".safetensors", ".json") or is_gguf(file)
