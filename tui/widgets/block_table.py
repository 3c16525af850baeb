"""The block table of the focused sequence: logical to physical."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from rich.text import Text

from appliance.stats import SEQUENCE_STATES
from appliance.tui import numbers, palette
from appliance.tui.state import is_running
from appliance.tui.widgets.panel import Panel, pair, wrapped

if TYPE_CHECKING:
    from appliance.events import BlockTable
    from appliance.stats import SequenceView
    from appliance.tui.view import View


class BlockTablePanel(Panel):
    """Shows the newest blocks of one sequence."""

    TITLE = "Sequence in focus"

    def reads(self, view: View) -> tuple[object, ...]:
        blocks = view.state.blocks if view.table is None else None
        cursor = view.look.cursor
        return view.focused, view.table, blocks, cursor

    def draw(self, view: View, width: int, height: int) -> list[Text]:
        sequence = view.focused
        if sequence is None:
            return [Text("tab chooses a sequence;", palette.MUTED),
                    Text("all others are then dimmed.", palette.MUTED)]  # fmt: skip
        lines = _facts(view, sequence, width)
        room = max(0, height - len(lines) - 2)
        if view.table is not None:
            return [*lines, Text(), *_entries(view, view.table, width, room)]
        if not is_running(sequence):
            return [*lines, *_elsewhere(sequence, width)]
        return [*lines, Text(), *_from_map(view, sequence, room + 1)]


def _facts(view: View, sequence: SequenceView, width: int) -> list[Text]:
    swatch, hue = view.swatch(sequence)
    name = Text.assemble((f"{swatch} ", hue), (sequence.request_id, f"bold {palette.BRIGHT}"))
    if sequence.index:
        name.append(f" #{sequence.index}", palette.TEXT)
    name.truncate(width, overflow="ellipsis")
    cached = f"{numbers.count(sequence.cached_tokens)} cached"
    pictures = []
    if sequence.picture_rows:
        rows = numbers.count(sequence.picture_rows)
        pictures = [pair("of these, of pictures", rows, width, note="rows")]
    return [
        name,
        pair("key", sequence.owner or "-", width),
        pair("prompt", numbers.count(sequence.prompt_tokens), width, note=cached),
        *pictures,
        pair("generated", numbers.count(sequence.output_tokens), width),
        pair("blocks", numbers.count(sequence.blocks), width, note=sequence.status),
        pair("age", numbers.clock(sequence.age_seconds), width),
    ]


def _entries(view: View, table: BlockTable, width: int, room: int) -> list[Text]:
    info = view.state.info
    names = info.precisions if info else ()
    num_full = table.num_tokens // info.block_size if info and info.block_size else 0
    first = max(0, len(table.blocks) - room)
    for place, entry in enumerate(table.blocks):
        if entry.block == view.look.cursor:
            first = min(max(0, place - room // 2), first)
    lines = [Text(f"{'logical':>7} {'physical':>9} {'refs':>5} {'hash':<9} KV", palette.MUTED)]
    for place in range(first, min(len(table.blocks), first + room)):
        entry = table.blocks[place]
        index = entry.precision
        # The server sends hashes of full blocks only to users who may know the prompts.
        known = entry.hash[:8] or ("hidden" if place < num_full else "open")
        color = palette.SHARED if entry.references > 1 else palette.TEXT
        line = Text(
            f"{place:>7,} {entry.block:>9,} {entry.references:>5} {known:<9} "
            f"{_short(names[index]) if index < len(names) else index}",
            color,
        )
        if entry.block == view.look.cursor:
            line.stylize(f"on {palette.FOCUSED}")
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    return lines


def _elsewhere(sequence: SequenceView, width: int) -> list[Text]:
    """Draw a waiting sequence's blocks in host memory and its reason to wait."""
    held = []
    if sequence.host_blocks:
        held = [pair("blocks in host memory", numbers.count(sequence.host_blocks), width)]
    what = SEQUENCE_STATES.get(sequence.status, "")
    return [*held, Text(), *wrapped(what, width, palette.MUTED)]


def _short(precision: str) -> str:
    """Shorten a precision to its column; the legend has the full name."""
    return "mixed" if "," in precision else precision.replace("-", " ").split(" ")[0]


def _from_map(view: View, sequence: SequenceView, room: int) -> list[Text]:
    """Draw the sequence's blocks in physical order, if there is no table."""
    blocks = view.state.blocks
    if blocks is None or view.emphasis.slot is None:
        return []
    own = np.flatnonzero((blocks.owners == view.emphasis.slot) & (blocks.references > 0)).tolist()
    lines = [Text("taken by it, in physical order", palette.MUTED)]
    runs: list[list[int]] = []
    for block in own:
        if runs and runs[-1][1] == block:
            runs[-1][1] = block + 1
        else:
            runs.append([block, block + 1])
    for start, end in runs[: max(0, room - 1)]:
        words = f"{start:,}" if end == start + 1 else f"{start:,} to {end - 1:,}"
        lines.append(Text(f"  {words}", palette.TEXT))
    return lines
