"""The model, its quality card, and its memory with the tiers below the KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from appliance.tui import numbers, palette
from appliance.tui.widgets.machine import gpu_lines, machine_lines
from appliance.tui.widgets.panel import HEADLINE, LongPanel, pair, wrapped

if TYPE_CHECKING:
    from appliance.events import Info, Job, QualityFact, ReplicaView, Stats
    from appliance.stats import EngineStats, RankInfo
    from appliance.tui.view import View


_BAR = "━"
# Names of a quality card's figures, see `appliance.commands.quality`.
_CARD = {
    "bits_per_weight": "bits per weight",
    "kld_mean": "KL divergence, mean",
    "kld_p99": "KL divergence, p99",
    "same_top_share": "same top token",
    "perplexity_ratio": "perplexity ratio",
    "tool_calls_share": "right tool calls, share of base",
}
_OF_KIND = "kld_mean_"  # and a kind of text


class ModelPanel(LongPanel):
    TITLE = "Model"
    DEFAULT_CSS = "ModelPanel { height: 1fr; }"

    def reads(self, view: View) -> tuple[object, ...]:
        stats = view.state.stats
        replicas = () if stats is None else stats.replicas
        return view.state.info, view.state.jobs, replicas, view.look.facts_down

    def all_lines(self, view: View, width: int) -> list[Text]:
        """Draw names and facts, the quality card, notes, and a running job."""
        info = view.state.info
        if info is None:
            return []
        facts = [
            ("architecture", info.architecture),
            ("device", info.device),
            ("backend", info.backend),
            ("weights", info.weight_format),
            ("KV cache", ", ".join(info.precisions) or info.kv_format),
            (
                "context",
                numbers.counted(info.context_length, "token") if info.context_length else "",
            ),
            ("sequences at once", numbers.count(info.max_num_seqs) if info.max_num_seqs else ""),
            ("loaded in", numbers.duration(info.load_seconds) if info.load_seconds else ""),
            ("restarts", str(info.restarts) if info.restarts else ""),
            ("server version", info.version),
        ]
        lines = [line for job in view.state.jobs for line in _job(job, width)]
        lines.append(pair(info.model, info.state, width, color=HEADLINE))
        lines += [pair(name, value, width) for name, value in facts if value]
        if view.state.stats is not None and view.state.stats.replicas:
            lines += [Text(), *_replicas(view.state.stats.replicas, info.replica, width)]
        if info.ranks:
            lines += [Text(), *_ranks(info.ranks, width)]
        if info.quality:
            lines += [Text(), *_quality(info.quality, width)]
        for note in info.notes:
            lines += [Text(), *wrapped(f"note: {note}", width, palette.WARNING)]
        return lines


def _replicas(replicas: tuple[ReplicaView, ...], shown: int, width: int) -> list[Text]:
    """Draw a line per engine process of the model."""
    lines = [Text("replicas", f"bold {palette.TEXT}")]
    for place, one in enumerate(replicas):
        facts = [
            f"{numbers.count(one.requests_running)} running",
            f"{numbers.count(one.requests_waiting)} waiting" if one.requests_waiting else "",
            f"KV {numbers.percent(one.kv_usage)}",
            f"hits {numbers.percent(one.prefix_hit_rate)}",
            f"restarts {one.restarts}" if one.restarts else "",
        ]
        color = palette.TEXT if one.state == "ready" else palette.WARNING
        name = f"{place}, shown" if place == shown else str(place)
        note = "  ".join(filter(None, facts))
        lines.append(pair(name, one.state, width, note=note, color=color))
    return lines


def _ranks(ranks: tuple[RankInfo, ...], width: int) -> list[Text]:
    """Draw a line for each process with a part of the model, and one for its link to the first."""
    lines = [Text("ranks", f"bold {palette.TEXT}")]
    for place, one in enumerate(ranks):
        facts = [
            f"share {one.share}",
            numbers.counted(one.threads, "thread") if one.threads else "",
            f"{one.bytes_per_second / 1e9:,.1f} GB/s" if one.bytes_per_second else "",
        ]
        held = numbers.size(one.weight_bytes + one.kv_bytes)
        lines.append(pair(str(place), held, width, note="  ".join(filter(None, facts))))
        lines += wrapped(one.reason, width, palette.WARNING)
        if (link := one.link) is not None:
            rate = f"{link.bytes_per_second / 1e9:,.1f} GB/s"
            lines.append(pair(f"  {link.path}", f"{1e6 * link.seconds:,.1f} us  {rate}", width))
            lines += wrapped(link.reason, width, palette.WARNING)
    return lines


def _quality(facts: tuple[QualityFact, ...], width: int) -> list[Text]:
    """Draw the quality card; the heading names what its figures compare with."""
    heading = Text("quality card", f"bold {palette.TEXT}")
    if note := next((fact.note for fact in facts if fact.note), ""):
        heading.append(f"  {note}", palette.NOTE)
    heading.truncate(width, overflow="ellipsis")
    return [
        heading,
        *(pair(_figure_name(fact.name), f"{fact.value:.4g}", width) for fact in facts),
    ]


def _figure_name(name: str) -> str:
    if name.startswith(_OF_KIND):
        return f"KL divergence, {name.removeprefix(_OF_KIND).replace('_', ' ')}"
    return _CARD.get(name, name)


def _job(job: Job, width: int) -> list[Text]:
    share = min(1.0, job.done / job.total) if job.total else 0.0
    done = round(width * share)
    left = "" if job.seconds_left is None else f"{numbers.clock(job.seconds_left)} left"
    amount = numbers.percent(share) if job.total else ""
    lines = [
        Text(job.name, f"bold {palette.BRIGHT}"),
        pair(job.stage, amount, width, note=left),
        Text.assemble((_BAR * done, palette.ACCENT), (_BAR * (width - done), palette.FAINT)),
    ]
    if job.parts_total:
        parts = f"{job.parts_done:,} of {job.parts_total:,}"
        loss = "" if job.loss is None else f"loss {job.loss:.3g}"
        lines.append(pair(job.part or "done", parts, width, note=loss))
    return [*lines, Text()]


class MemoryPanel(LongPanel):
    """The memory plan beside its actual use."""

    TITLE = "Memory"
    DEFAULT_CSS = "MemoryPanel { height: 1fr; }"

    def reads(self, view: View) -> tuple[object, ...]:
        return view.state.info, view.state.stats, view.look.facts_down

    def all_lines(self, view: View, width: int) -> list[Text]:
        """Draw the plan as a bar, the measurements, and the tiers below the KV cache."""
        info, stats = view.state.info, view.state.stats
        lines: list[Text] = []
        if info is not None and info.memory_bytes:
            lines = _plan(info, width)
        if stats is None:
            return lines
        lines += [Text(), Text("measured", f"bold {palette.TEXT}"), *_cache(info, stats, width)]
        if stats.machine is not None:
            for gpu in stats.machine.gpus:
                lines += gpu_lines(gpu, width)
            lines += machine_lines(stats.machine, width)
        each = info.kv_bytes / info.num_blocks if info and info.num_blocks else 0.0
        if info is not None and info.reads_pictures:
            lines += [*_title("pictures"), *_pictures(stats.engine, width)]
        return [*lines, *tier_lines(stats.engine, each, width)]


def _plan(info: Info, width: int) -> list[Text]:
    parts = [
        ("weights", info.weight_bytes, palette.ACCENT),
        ("KV cache", info.kv_bytes, palette.WRITING),
        ("workspace", info.workspace_bytes, palette.WARNING),
        *([("Python and libraries", own, palette.NOTE)] if (own := info.process_bytes) else []),
    ]
    rest = max(0, info.memory_bytes - sum(size for _, size, _ in parts))
    bar, seen, drawn = Text(), 0, 0
    for _, size, color in (*parts, ("left", rest, palette.FREE)):
        seen += size
        end = min(width, round(width * seen / info.memory_bytes))
        bar.append(_BAR * max(0, end - drawn), color)
        drawn = max(drawn, end)
    lines = [pair("planned of", numbers.size(info.memory_bytes), width, color=HEADLINE), bar]
    for name, size, color in parts:
        line = Text.assemble(("■ ", color))
        lines.append(line.append_text(pair(name, numbers.size(size), width - 2)))
    lines.append(pair("left for all else", numbers.size(rest), width))
    return lines


def _cache(info: Info | None, stats: Stats, width: int) -> list[Text]:
    engine = stats.engine
    lines = []
    if info is not None and engine.blocks_total and info.kv_bytes:
        each = info.kv_bytes / engine.blocks_total
        for name, blocks in (
            ("KV held by sequences", engine.blocks_active),
            ("KV kept for reuse", engine.blocks_cached),
            ("KV free", engine.blocks_free),
        ):
            share = numbers.percent(blocks / engine.blocks_total)
            lines.append(pair(name, numbers.size(round(each * blocks)), width, note=share))
    return lines


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


def _pictures(engine: EngineStats, width: int) -> list[Text]:
    encoded, hits = engine.pictures_encoded_total, engine.picture_hits_total
    each = f"{numbers.duration(engine.picture_seconds)} each" if encoded else ""
    return [
        pair("encoded", numbers.count(encoded), width, note=each),
        pair("met again", numbers.count(hits), width, note=_share(hits, encoded + hits)),
        pair("rows kept", numbers.size(engine.picture_bytes), width),
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
