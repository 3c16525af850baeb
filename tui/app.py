"""`appliance top`: follows a running server over HTTP and shows its KV cache live.

It loads neither torch nor the engine; everything it knows comes through a feed.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from rich.color import ColorSystem
from rich.console import COLOR_SYSTEMS
from textual.app import App, SystemCommand
from textual.drivers.linux_driver import LinuxDriver
from textual.filter import ANSIToTruecolor
from textual.widgets import Input

from appliance.tui import palette
from appliance.tui.client import EventFeed
from appliance.tui.controls import ControlError, Controls
from appliance.tui.look import SequenceKey
from appliance.tui.raster import ColorMode
from appliance.tui.screens.dashboard_screen import DashboardScreen
from appliance.tui.screens.facts import LogScreen, ModelScreen
from appliance.tui.screens.map import MapScreen
from appliance.tui.screens.overview import OverviewScreen
from appliance.tui.screens.requests import RequestsScreen
from appliance.tui.session import Session
from appliance.tui.state import ConnectionPhase, is_running
from appliance.tui.terminal import (
    SCHEMES,
    SIXTEEN,
    Colorless,
    Colors,
    DisplaySettings,
    OnlyAscii,
    PrivateConsole,
    Recolor,
)
from appliance.tui.wire import ThriftyDriver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from textual.driver import Driver
    from textual.events import Key
    from textual.filter import LineFilter
    from textual.screen import Screen

    from appliance.tui.recording import Recorder
    from appliance.tui.state import FeedItem

FRAMES_PER_SECOND = 5
TABLE_SECONDS = 1.0
MESSAGE_SECONDS = 6.0
# Textual calls these modes.
SCREENS: dict[str, type[DashboardScreen]] = {
    "overview": OverviewScreen, "map": MapScreen, "requests": RequestsScreen, "model": ModelScreen,
    "log": LogScreen,
}  # fmt: skip


class Feed(Protocol):
    """A source of events."""

    name: str

    async def follow(self, publish: Callable[[FeedItem], None]) -> None:
        """Publish events until the feed ends."""
        ...


class DashboardApp(App[None]):
    """Follows one feed and paints its state at a limited rate.

    Args:
        controls: commands for the same server; None for a recording.

    Attributes:
        session: the feed's state and the user's view of it.
        terminal: the terminal in use, unless it is a browser or a test.
    """

    TITLE = "appliance top"
    DEFAULT_MODE = "overview"
    NOTIFICATION_TIMEOUT = MESSAGE_SECONDS
    CSS = f"""
    Toast {{ background: {palette.FOCUSED}; color: {palette.TEXT}; padding: 0 1; }}
    """

    def __init__(
        self,
        feed: Feed,
        *,
        controls: Controls | None = None,
        recorder: Recorder | None = None,
        display: DisplaySettings = DisplaySettings(),  # noqa: B008  (frozen)
    ) -> None:
        super().__init__()
        # Textual's console knows the terminal's colours from its environment.
        system = display.system or COLOR_SYSTEMS[self.console.color_system or "truecolor"]
        self.console = PrivateConsole(system)
        self.depth = None if self.no_color or display.colors is Colors.NONE else system
        self.session = Session(
            feed.name,
            controls=controls,
            lettered=self.depth is None or display.ascii,
            recorder=recorder,
        )
        self.session.changed = self.paint
        for name, screen in SCREENS.items():
            self.add_mode(name, partial(screen, self.session))
        self.terminal: ThriftyDriver | None = None
        self._feed, self._display_of = feed, display
        self._own_filters: list[LineFilter] = []
        self._painted: tuple[object, ...] = ()
        self._next_panels = 0.0
        self._use_scheme(display.theme)
        for theme in palette.THEMES:
            self.register_theme(theme)
        self.theme = palette.theme_name(display.theme)  # later, all styles would be found twice

    def get_driver_class(self) -> type[Driver]:
        """Replace Textual's terminal driver by one that sends only changes."""
        chosen = super().get_driver_class()
        return ThriftyDriver if chosen is LinuxDriver else chosen

    def get_line_filters(self) -> list[LineFilter]:
        """Return the filters of all output; ours replace Textual's filter for no colours."""
        textuals = super().get_line_filters()
        return [*(one for one in textuals if isinstance(one, ANSIToTruecolor)), *self._own_filters]

    def on_mount(self) -> None:
        self._follow()
        if self.session.controls is not None:
            self.run_worker(self._watch_table(self.session.controls), name="block table")
        self.set_interval(1 / FRAMES_PER_SECOND, self.paint_frame)

    def _follow(self) -> None:
        """Follow the feed; a second call replaces the first connection."""
        following = self._feed.follow(self.take)
        self.run_worker(following, name="feed", group="feed", exclusive=True)

    def action_next_replica(self) -> None:
        state = self.session.state
        count = 0 if state.stats is None else len(state.stats.replicas)
        if count < 2 or state.info is None:
            self.notify("The model has one engine process.", markup=False)
        elif not isinstance(self._feed, EventFeed):
            self.notify("A recording shows only the replica that it was made of.", markup=False)
        else:
            self._feed.replica = (state.info.replica + 1) % count
            self._follow()

    def on_key(self, event: Key) -> None:
        """Insert keys typed before the input field got the focus."""
        if isinstance(self.focused, Input) and event.is_printable and event.character:
            self.focused.insert_text_at_cursor(event.character)
            event.prevent_default()

    def on_unmount(self) -> None:
        self.session.close()

    def take(self, item: FeedItem) -> None:
        """Take an item for the next frame; raise ValueError if it is invalid."""
        if warning := self.session.take(item):
            self.notify(warning, severity="warning", markup=False)

    def paint(self, *, panels: bool = True) -> None:
        screen = self.screen_stack[0] if self.is_running and self.screen_stack else None
        if isinstance(screen, DashboardScreen):  # otherwise before the start or after the end
            screen.paint(self.session.view(), panels=panels, terminal=self.terminal)

    def paint_frame(self) -> None:
        """Paint the map each frame, and numbers once a second or after an important change."""
        if not (self.is_running and self.screen_stack):
            return  # a timer's last tick may come after the last screen is gone
        now, state = time.monotonic(), self.session.state
        happened = (self.session.look, state.connection, state.info, self.screen)
        panels = now >= self._next_panels or happened != self._painted
        if panels:
            self._next_panels = now + 1.0 - 0.5 / FRAMES_PER_SECOND
            self._painted = happened
        self.paint(panels=panels)

    async def _watch_table(self, controls: Controls) -> None:
        while True:
            await asyncio.sleep(TABLE_SECONDS)
            session = self.session
            focused = session.view().focused
            live = session.state.connection.phase is ConnectionPhase.LIVE
            if focused is None or not live or not is_running(focused) or session.look.held:
                continue
            try:
                self.take(await controls.block_table(SequenceKey.of(focused)))
            except ControlError:
                # The sequence just ended, or the server is too old: the panel uses the map's data.
                continue

    def _use_scheme(self, name: str) -> None:
        ours: list[LineFilter] = [OnlyAscii()] if self._display_of.ascii else []
        if self.depth is None:
            ours.append(Colorless())
        elif self.depth is ColorSystem.STANDARD:
            ours.append(Recolor(SIXTEEN, dim="bright_black"))
        elif SCHEMES[name]:
            ours.append(Recolor(SCHEMES[name]))
        self._own_filters = ours

    def use_theme(self, name: str) -> None:
        if self.depth not in (ColorSystem.TRUECOLOR, ColorSystem.EIGHT_BIT):
            self.notify("This terminal has too few colours for themes.", markup=False)
            return
        self._use_scheme(name)
        self.theme = palette.theme_name(name)
        self.refresh(repaint=True, layout=True)
        for widget in self.screen.walk_children():
            widget.refresh()

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        for name in SCREENS:
            yield SystemCommand(f"Screen: {name}", "show it", partial(self.switch_mode, name))
        for mode in ColorMode:
            choose = partial(self.session.change, mode=mode)
            words = "meaning of the block map's colours"
            yield SystemCommand(f"Colours: {mode.value}", words, choose)
        for name in SCHEMES:
            choose = partial(self.use_theme, name)
            yield SystemCommand(f"Theme: {name}", "other colours for all", choose)
        shown = self.screen_stack[0]
        if isinstance(shown, DashboardScreen):
            words = "hold the picture still, or resume"
            yield SystemCommand("Pause", words, shown.action_pause)
            words = "the map and the sequences of another engine process of the model"
            yield SystemCommand("Next replica", words, self.action_next_replica)
            yield SystemCommand("Show all", "no sequence in focus", shown.action_show_all)
            words = "the one in focus, after confirmation"
            yield SystemCommand("Abort request", words, shown.action_abort)
            yield SystemCommand("Help", "keys and colours", shown.action_help)
        yield SystemCommand("Quit", "leave; the server goes on", self.exit)
