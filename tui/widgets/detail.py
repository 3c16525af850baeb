"""The line that describes the block under the cursor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from appliance.events import NO_OWNER, BlockState
from appliance.tui import numbers, palette
from appliance.tui.look import SequenceKey
from appliance.tui.state import is_running
from appliance.tui.widgets.lines import Lines

if TYPE_CHECKING:
    from appliance.tui.blocks import Blocks
    from appliance.tui.view import View

_STATES = {
    BlockState.FREE: "free",
    BlockState.CACHED: "cached",
    BlockState.ACTIVE: "active",
    BlockState.WRITING: "being written",
    BlockState.LOADING: "being loaded",
}


class Detail(Lines):
    """One line of facts about one block."""

    DEFAULT_CSS = "Detail { height: 1; }"

    def reads(self, view: View) -> tuple[object, ...]:
        return view.state.blocks, view.look.cursor, view.state.sequences, view.table

    def draw(self, view: View, width: int, height: int) -> list[Text]:
        blocks, cursor = view.state.blocks, view.look.cursor
        if blocks is None or cursor is None or cursor >= blocks.num_blocks:
            return []
        line = Text.assemble(
            ("◆ ", palette.CURSOR), (f"block {cursor:,}", f"bold {palette.BRIGHT}")
        )
        for fact in block_facts(view, blocks, cursor):
            line.append(" · ", palette.FAINT).append(fact, palette.TEXT)
        line.truncate(width, overflow="ellipsis")
        return [line]


def block_facts(view: View, blocks: Blocks, block: int) -> list[str]:
    """List facts about a block, most important first."""
    one = blocks.part(range(block, block + 1))
    state, references = int(one.states[0]), int(one.references[0])
    facts = [_STATES.get(BlockState(state), "") if state in set(BlockState) else f"state {state}"]
    if state == BlockState.FREE:
        return facts
    if owner := _owner(view, int(one.owners[0])):
        facts.append(owner)
    if references:
        facts.append(
            "255+ references" if references == 255 else numbers.counted(references, "reference")
        )
    names = view.state.info.precisions if view.state.info else ()
    index = int(one.precisions[0])
    if index < len(names):
        facts.append(names[index])
    facts.append(f"changed {numbers.clock(view.clock - float(one.changed[0]))} ago")
    for place, entry in enumerate(view.table.blocks if view.table else ()):
        if entry.block == block:
            facts.append(f"logical block {place:,} of the sequence in focus")
            facts += [f"hash {entry.hash[:12]}"] if entry.hash else []
    return facts


def _owner(view: View, slot: int) -> str:
    if slot == NO_OWNER:
        return ""
    for sequence in view.state.sequences:
        if sequence.slot == slot and is_running(sequence):
            choice = f" #{sequence.index}" if SequenceKey.of(sequence).choice else ""
            of = f" of {sequence.owner}" if sequence.owner else ""
            return f"{sequence.request_id}{choice}{of}"
    return "its sequence has ended"
