"""The engine of the simulation: everything is real but the device, the disk and the clock."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

from support.simulation.guessing_speculator import GuessingSpeculator
from support.simulation.simulated_pictures import encode
from support.simulation.virtual_model import EOS, VOCAB
from support.simulation.virtual_runner import VirtualRunner

from appliance.engine.blocks.block_manager import BlockManager
from appliance.engine.blocks.block_pool import num_open_blocks
from appliance.engine.blocks.state_slots import StateSlots
from appliance.engine.engine import LLMEngine
from appliance.engine.nouns.messages import EngineInfo
from appliance.engine.nouns.moves import Rates
from appliance.engine.run.encoded_pictures import EncodedPictures
from appliance.engine.run.picture_queue import PictureQueue
from appliance.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from appliance.engine.tiers.tiers import Tiers, TierSizes
from appliance.engine.tiers.write_behind import WriteBehind

if TYPE_CHECKING:
    from support.simulation.load_script import Setting
    from support.simulation.virtual_disk import VirtualDisk
    from support.simulation.virtual_runner import Clock

PREFILL = 100.0  # tokens per second
PICTURE_BYTES = 80  # of rows that are kept: ten rows, and each conversation may need more


class Parts(NamedTuple):
    """An engine, and the parts that the simulation inspects."""

    blocks: BlockManager
    runner: VirtualRunner
    tiers: Tiers
    scheduler: Scheduler
    engine: LLMEngine


def build_engine(
    setting: Setting, clock: Clock, disk: VirtualDisk | None, noise: random.Random
) -> Parts:
    """Build an engine with an empty cache, over a disk that may hold blocks."""
    limits = SchedulerLimits(
        setting.max_num_seqs, setting.max_num_batched_tokens, setting.context_length
    )
    num_open = num_open_blocks(
        setting.max_num_seqs,
        setting.max_num_batched_tokens,
        setting.block_size,
        plans=1 + setting.depth,
    )
    blocks = BlockManager(
        setting.num_blocks,
        setting.block_size,
        prefix_caching=setting.prefix_caching,
        num_open=num_open if setting.sealed else 0,
        states=StateSlots(
            setting.max_num_seqs, setting.checkpoints if setting.prefix_caching else 0
        )
        if setting.recurrent
        else None,
    )
    pictures = None
    if setting.pictures:
        device = SimpleNamespace(send=lambda values: values)
        encoded = EncodedPictures(encode, device, limit_bytes=PICTURE_BYTES)
        pictures = PictureQueue(encode, encoded, beside_steps=False)
    runner = VirtualRunner(
        blocks,
        max_rows=setting.max_num_batched_tokens,
        sealed=setting.sealed,
        depth=setting.depth,
        noise=noise,
        clock=clock,
        pictures=None if pictures is None else pictures.encoded,
    )
    sizes = TierSizes(
        block_bytes=8,
        open_bytes=8 if setting.sealed else 0,
        host_bytes=8 * setting.host_blocks,
        keeps_evicted=setting.host_keeps_evicted,
        state_bytes=16 if setting.recurrent else 0,
    )
    # Moving a block takes as long as computing so many tokens.
    rates = Rates(prefill=PREFILL, moves=8.0 * PREFILL / setting.tokens_per_move)
    writes = None
    if disk is not None:
        writes = WriteBehind(
            blocks,
            disk,  # type: ignore[arg-type]
            runner.save,
            clock.read,
            runner.save_states,
        )
    tiers = Tiers(blocks, sizes, rates, disk, writes)  # type: ignore[arg-type]
    speculator = None
    if setting.drafts:
        speculator = GuessingSpeculator(setting.drafts, noise)
    scheduler = Scheduler(
        blocks,
        limits,
        (EOS,),
        look_ahead=setting.depth == 1,
        tiers=tiers,
        speculator=speculator,
    )
    engine = LLMEngine(
        scheduler, tiers, runner, engine_info(setting), clock=clock.read, pictures=pictures
    )
    return Parts(blocks, runner, tiers, scheduler, engine)


def counts_of(engine: LLMEngine, runner: VirtualRunner, blocks: BlockManager) -> Counter[str]:
    """How often each notable case came up in the life of an engine."""
    seen: Counter[str] = Counter()
    stats = engine.stats()
    seen["steps"] += stats.steps_total
    seen += runner.seen
    seen["preempted"] += stats.preemptions_total
    seen["accepted drafts"] += stats.accepted_tokens_total
    seen["rejected drafts"] += stats.draft_tokens_total - stats.accepted_tokens_total
    seen["tokens from the cache"] += stats.prefix_hits_total
    seen["pictures encoded"] += stats.pictures_encoded_total
    seen["pictures met again"] += stats.picture_hits_total
    seen["evictions"] += blocks.pool.num_evictions
    if (states := blocks.states) is not None:
        seen["checkpoints"] += states.num_saved
        seen["evicted checkpoints"] += states.checkpoints.num_evictions
        seen["restored checkpoints"] += states.num_restored
        seen["rewound states"] += stats.state_rewinds_total
    seen["swapped"] += stats.swaps_total
    seen["blocks out to the host"] += stats.swapped_out_total
    seen["blocks back from the host"] += stats.swapped_in_total
    seen["tokens from the host"] += stats.prefix_hits_host_total
    seen["tokens from the disk"] += stats.prefix_hits_disk_total
    return seen


def engine_info(setting: Setting) -> EngineInfo:
    return EngineInfo(
        model="virtual",
        architecture="",
        device="",
        backend="",
        weight_format="",
        kv_format="",
        context_length=setting.context_length,
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        block_size=setting.block_size,
        num_blocks=setting.num_blocks,
        max_num_seqs=setting.max_num_seqs,
        weight_bytes=0,
        kv_bytes=0,
        workspace_bytes=0,
        memory_bytes=0,
        load_seconds=0.0,
        fingerprint="",
    )
