"""What the keys do: each action changes how the person looks, and paints."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from appliance.tui.look import Held, Look, SequenceKey
from appliance.tui.raster import ColorMode
from appliance.tui.screens.confirm import ConfirmScreen
from appliance.tui.screens.help import HelpScreen
from appliance.tui.screens.requests import RequestsPage
from appliance.tui.viewport import levels
from appliance.tui.widgets.block_map import BlockMap
from appliance.tui.widgets.panel import LongPanel

if TYPE_CHECKING:
    from collections.abc import Callable

    from textual.app import App

    from appliance.tui.messages import BlockChosen, QueryTyped, SequenceChosen, SortChosen
    from appliance.tui.state import DashboardState
    from appliance.tui.view import View

    _Base = App[None]
    Command = tuple[str, str, Callable[[], object]]
else:
    _Base = object

MESSAGE_SECONDS = 5.0
PAGES = ("overview", "map", "requests", "model", "log")


class Looking(_Base):
    """The part of the application that a person steers.

    Attributes:
        look: how the person looks at the server.
    """

    look: Look
    state: DashboardState

    def view_now(self) -> View:
        """What is shown now."""
        raise NotImplementedError

    def paint(self, *, panels: bool = True) -> None:
        """Bring the screen up to date."""
        raise NotImplementedError

    def state_at(self, when: float) -> tuple[DashboardState, float] | None:
        """What was known at a moment of the past."""
        raise NotImplementedError

    def end_request(self, key: SequenceKey) -> None:
        """Ask the server to abort a request."""
        raise NotImplementedError

    def change(self, **changes: object) -> None:
        """Look in another way."""
        self.look = replace(self.look, **changes)  # type: ignore[arg-type]  # names of its fields
        self.paint()

    def say(self, message: str) -> None:
        """Tell the person something for a few seconds."""
        self.change(message=message)
        self.set_timer(MESSAGE_SECONDS, lambda: self._unsay(message))

    def _unsay(self, message: str) -> None:
        if self.look.message == message:
            self.change(message="")

    def action_repaint(self) -> None:
        """Show what there is."""
        self.paint()

    async def action_page(self, name: str) -> None:
        """Turn to another page."""
        await self.switch_mode(name)

    def action_next_mode(self) -> None:
        """Let the colours mean something else."""
        self.change(mode=self.look.mode.next)

    def action_pause(self) -> None:
        """Hold the picture still, or let it go on."""
        held = Held(self.state, time.monotonic()) if self.look.held is None else None
        self.change(held=held)

    def action_rewind(self, seconds: int) -> None:
        """Go back in time, or forward again with a negative number; at the end, live."""
        now = time.monotonic()
        when = (now if self.look.held is None else self.look.held.at) - seconds
        if when >= now:
            self.change(held=None)
            return
        found = self.state_at(when)
        if found is not None:
            self.change(held=Held(*found))

    def action_focus_sequence(self, step: int) -> None:
        """Bring out another sequence."""
        keys = [SequenceKey.of(sequence) for sequence in self.view_now().listed]
        if not keys:
            return
        if self.look.focus in keys:
            self.change(focus=keys[(keys.index(self.look.focus) + step) % len(keys)])
        else:
            self.change(focus=keys[0] if step > 0 else keys[-1])

    def action_show_all(self) -> None:
        """Bring out all sequences again; then look at all blocks, and drop the filter."""
        if self.look.focus is not None:
            self.change(focus=None)
        elif self.look.level or self.look.cursor is not None:
            self.change(level=0, cursor=None)
        elif isinstance(self.screen, RequestsPage):
            self.screen.clear_filter()

    def action_focus_owner(self) -> None:
        """Bring out the sequence that owns the block under the cursor."""
        view, cursor = self.view_now(), self.look.cursor
        if view.state.blocks is None or cursor is None or cursor >= view.state.blocks.num_blocks:
            return
        slot = int(view.state.blocks.owners[cursor])
        keys = [SequenceKey.of(one) for one in view.state.sequences if one.slot == slot]
        self.change(focus=keys[0] if keys else None)

    def action_zoom(self, step: int) -> None:
        """Look closer or from farther away."""
        block_map, blocks = self.screen.query_one(BlockMap), self.view_now().state.blocks
        if blocks is None or not blocks.num_blocks:
            return
        view = self.view_now()
        size = block_map.size
        most = len(levels(blocks.num_blocks, size.width, size.height, lettered=view.lettered)) - 1
        level = min(max(self.look.level + step, 0), most)
        cursor = self.look.cursor
        if cursor is None and level:
            cursor = blocks.num_blocks // 2
        self.change(level=level, cursor=cursor)

    def action_move(self, columns: int, rows: int) -> None:
        """Move the cursor by pixels of the map."""
        view = self.view_now()
        blocks = view.state.blocks
        if blocks is None or not blocks.num_blocks:
            return
        port = self.screen.query_one(BlockMap).viewport(view)
        cursor = self.look.cursor
        if cursor is None:
            self.change(cursor=port.span.start + len(port.span) // 2)
            return
        across = max(1, round(port.grid.blocks_per_pixel))
        cells = 1 if port.lettered else 2  # a line of cells is two of pixels
        moved = cursor + columns * across + rows * port.line_of_blocks() * cells
        self.change(cursor=min(max(moved, 0), blocks.num_blocks - 1))

    def action_next_sort(self) -> None:
        """Order the table by another column."""
        self.change(sort=self.look.sort.next)

    def action_reverse_sort(self) -> None:
        """Order the table the other way round."""
        self.change(ascending=not self.look.ascending)

    def on_query_typed(self, message: QueryTyped) -> None:
        """Show only requests that contain all words."""
        self.change(query=message.query)

    def action_scroll_log(self, lines: int) -> None:
        """Go back in the log, or forward with a negative number."""
        most = max(0, len(self.view_now().state.log) - 1)
        self.change(log_back=min(max(self.look.log_back + lines, 0), most))

    def action_scroll_facts(self, lines: int) -> None:
        """Go down in the facts of the model page, or up with a negative number."""
        most = max((panel.hidden for panel in self.screen.query(LongPanel)), default=0)
        self.change(facts_down=min(max(self.look.facts_down + lines, 0), most))

    def action_abort(self) -> None:
        """Abort the request in focus, once the person has confirmed it."""
        sequence = self.view_now().focused
        if sequence is None:
            self.say("choose a request first: tab")
            return
        key = SequenceKey.of(sequence)
        of = f" of {sequence.owner}" if sequence.owner else ""

        def decided(yes: bool | None) -> None:
            if yes:
                self.end_request(key)

        question = f"Abort {key.request_id}{of}?"
        self.push_screen(
            ConfirmScreen(question, "Its client is told that whoever runs the server ended it."),
            decided,
        )

    def action_help(self) -> None:
        """Explain keys and colours."""
        self.push_screen(HelpScreen(self.view_now().lettered))

    def on_sequence_chosen(self, message: SequenceChosen) -> None:
        """Bring out what was clicked, or all again."""
        self.change(focus=None if message.key == self.look.focus else message.key)

    def on_block_chosen(self, message: BlockChosen) -> None:
        """Move the cursor there."""
        self.change(cursor=message.block)

    def on_sort_chosen(self, message: SortChosen) -> None:
        """Order by that column, or the other way round if it is so already."""
        same = message.sort is self.look.sort
        self.change(sort=message.sort, ascending=same and not self.look.ascending)

    def commands(self) -> list[Command]:
        """Entries of the command palette: title, what it does, and the call."""
        pages: list[Command] = [
            (f"Page: {name}", "turn to it", partial(self.switch_mode, name)) for name in PAGES
        ]
        words = "what the colours of the block map say"
        modes: list[Command] = [
            (f"Colours: {mode.value}", words, partial(self.change, mode=mode)) for mode in ColorMode
        ]
        return [
            *pages,
            *modes,
            ("Pause", "hold the picture still, or let it go on", self.action_pause),
            ("Show all", "no sequence in focus", self.action_show_all),
            ("Abort request", "the one in focus, after a question", self.action_abort),
            ("Help", "keys and colours", self.action_help),
            ("Quit", "leave; the server goes on", self.exit),
        ]
