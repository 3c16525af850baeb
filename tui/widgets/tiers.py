"""Draws preemptions, and the tiers below the KV cache: host memory and disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from appliance.tui import numbers, palette
from appliance.tui.widgets.panel import pair

if TYPE_CHECKING:
    from appliance.stats import EngineStats


def tier_lines(engine: EngineStats, block_bytes: float, width: int) -> list[Text]:
    """Draw preemptions, and where evicted blocks are.

    `block_bytes` is the size of a block in all layers, 0 if unknown.
    """
    lines = [*_title("making room"), *_preemptions(engine, width)]
    if engine.state_slots:
        lines += [*_title("recurrent state"), *_states(engine, width)]
    lines += [*_title("host memory"), *_host(engine, block_bytes, width)]
    return [*lines, *_title("disk"), *_disk(engine, width)]


def _title(words: str) -> list[Text]:
    return [Text(), Text(words, f"bold {palette.TEXT}")]


def _preemptions(engine: EngineStats, width: int) -> list[Text]:
    total, swaps = engine.preemptions_total, engine.swaps_total
    return [
        pair("sequences preempted", numbers.count(total), width),
        pair("swapped to host memory", numbers.count(swaps), width, note=_share(swaps, total)),
        pair(
            "computed again", numbers.count(total - swaps), width, note=_share(total - swaps, total)
        ),
        pair("waiting with blocks kept", numbers.count(engine.swapped), width),
    ]  # fmt: skip


def _states(engine: EngineStats, width: int) -> list[Text]:
    cached, room = engine.state_checkpoints_cached, engine.state_checkpoints
    size = numbers.size(engine.state_bytes)
    return [
        pair("slots used", numbers.count(engine.state_slots_used), width, note=f"{size} each"),
        pair("checkpoints cached", numbers.count(cached), width, note=_share(cached, room)),
        pair("sequences begun from one", numbers.count(engine.state_restores_total), width),
        pair("checkpoints evicted", numbers.count(engine.state_evictions_total), width),
    ]


def _host(engine: EngineStats, block_bytes: float, width: int) -> list[Text]:
    capacity = engine.kv_host_capacity
    if not capacity:
        return [Text("none; --kv-host-memory gives some", palette.NOTE)]
    used = _share(engine.kv_host_blocks, capacity)
    room = numbers.counted(capacity, "block")
    size = numbers.size(round(capacity * block_bytes)) if block_bytes else ""
    moved = f"{numbers.count(engine.swapped_out_total)} / {numbers.count(engine.swapped_in_total)}"
    return [
        pair("room", room, width, note=size),
        pair("blocks there", numbers.count(engine.kv_host_blocks), width, note=used),
        pair("of sequences that wait", numbers.count(engine.kv_host_swapped), width),
        pair("blocks out / back", moved, width),
        _hits(engine, engine.prefix_hits_host_total, width),
    ]


def _disk(engine: EngineStats, width: int) -> list[Text]:
    capacity = engine.kv_disk_capacity_bytes
    if not capacity:
        return [Text("none; --kv-disk names a folder", palette.NOTE)]
    counts = (
        ("written", engine.kv_disk_written_total),
        ("read", engine.kv_disk_read_total),
        ("to be written", engine.kv_disk_pending),
    )
    losses = (
        ("gone before they were written", engine.kv_disk_dropped_total),
        ("removed for the cap", engine.kv_disk_evicted_total),
        ("damaged, removed", engine.kv_disk_corrupt_total),
    )
    used = numbers.size(engine.kv_disk_bytes)
    lines = [
        pair("files of all models", used, width, note=f"of {numbers.size(capacity)}"),
        pair("blocks of this model", numbers.count(engine.kv_disk_blocks), width),
        *(pair(name, numbers.count(blocks), width) for name, blocks in counts),
        *(pair(name, numbers.count(blocks), width) for name, blocks in losses if blocks),
        _hits(engine, engine.prefix_hits_disk_total, width),
    ]
    if not engine.kv_disk_writing:
        lines.insert(0, Text("cannot be written to; the log says why", palette.WARNING))
    return lines


def _hits(engine: EngineStats, tokens: int, width: int) -> Text:
    """Draw hits as a share of all prompt tokens looked up."""
    looked_up = engine.prefix_queries_total
    note = numbers.counted(tokens, "token")
    value = numbers.percent(tokens / looked_up) if looked_up else "-"
    return pair("prefix hits from there", value, width, note=note)


def _share(part: int, whole: int) -> str:
    return numbers.percent(part / whole) if whole else ""
