"""Details of the focused sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from appliance.stats import SEQUENCE_STATES
from appliance.tui import numbers, palette
from appliance.tui.state import is_running
from appliance.tui.widgets.panel import HEADLINE, Panel, pair, wrapped

if TYPE_CHECKING:
    from appliance.tui.view import View


_WIDE = 70  # cells; enough for two columns


class RequestDetail(Panel):
    """Shows a prompt only if the server was started to send it."""

    TITLE = "Request"

    def reads(self, view: View) -> tuple[object, ...]:
        return view.focused, view.state.info

    def draw(self, view: View, width: int, height: int) -> list[Text]:
        one, info = view.focused, view.state.info
        if one is None:
            return [Text("No request is in focus; ↓ chooses one.", palette.MUTED)]
        slots = one.blocks * info.block_size if info else 0
        held = min(slots, one.computed_tokens)
        each = info.kv_bytes / info.num_blocks if info and info.num_blocks else 0
        columns = 2 if width >= _WIDE else 1
        room = width // columns - (columns - 1)
        facts = [
            pair("choice", str(one.index), room),
            pair("key", one.owner or "-", room),
            pair("model", one.model or (info.model if info else "-"), room),
            pair("state", one.status, room, color=HEADLINE),
            pair("age", numbers.clock(one.age_seconds), room),
            pair("prompt", numbers.count(one.prompt_tokens), room, note="tokens"),
            pair("from the cache", numbers.count(one.cached_tokens), room, note="tokens"),
            pair("generated", numbers.count(one.output_tokens), room, note="tokens"),
            pair("tokens a second", numbers.rate(one.tokens_per_second), room),
            pair("preempted", numbers.count(one.preemptions), room),
            pair("blocks", numbers.count(one.blocks), room),
        ]
        if one.draft_tokens:
            share = numbers.percent(one.accepted_tokens / one.draft_tokens)
            facts.append(pair("guessed tokens accepted", share, room))
        if one.picture_rows:
            count = numbers.count(one.picture_rows)
            facts.insert(6, pair("of these, of pictures", count, room, note="rows"))
        if one.adapter:
            facts.insert(3, pair("adapter", one.adapter, room))
        if one.kept_tokens:
            facts.append(pair("kept for it", numbers.count(one.kept_tokens), room, note="tokens"))
        if one.host_blocks:
            facts.append(pair("blocks in host memory", numbers.count(one.host_blocks), room))
        if slots and one.blocks:
            facts.append(pair("of their slots in use", numbers.percent(held / slots), room))
        if each and one.blocks:
            facts.append(pair("KV memory", numbers.size(round(each * one.blocks)), room))
        rows = -(-len(facts) // columns)
        beside = [[fact] for fact in facts[:rows]]
        for row, fact in zip(beside, facts[rows:], strict=False):
            row.append(fact)
        lines = [
            *wrapped(one.request_id, width, f"bold {palette.BRIGHT}"),
            *(Text("  ").join(row) for row in beside),
        ]
        if (what := SEQUENCE_STATES.get(one.status)) and not is_running(one):
            lines += [Text(), *wrapped(f"{one.status}: {what}", width, palette.MUTED)]
        if one.prompt:
            lines += [Text(), *wrapped(one.prompt, width, palette.TEXT)]
        elif info is not None:
            which = "another key's prompts" if info.prompts_shown else "prompts"
            lines += [Text(), Text(f"This server does not show {which}.", palette.NOTE)]
        return lines
