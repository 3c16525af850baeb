"""`appliance top`: attaches to a running server over HTTP and shows its memory breathe.

Loads neither torch nor the engine: all it knows comes through a feed.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import rich
import textual
from rich.color import ColorSystem
from rich.traceback import Traceback
from textual._compositor import ChopsUpdate
from textual.app import App, SystemCommand

from appliance.tui import palette
from appliance.tui.controls import ControlError, Controls
from appliance.tui.display import Colors, Display
from appliance.tui.look import Look, SequenceKey
from appliance.tui.looking import Looking
from appliance.tui.scheme import SCHEMES, SIXTEEN, Colorless, OnlyAscii, Recolor
from appliance.tui.screens.facts import LogPage, ModelPage
from appliance.tui.screens.map import MapPage
from appliance.tui.screens.overview import Overview
from appliance.tui.screens.page import Page
from appliance.tui.screens.requests import RequestsPage
from appliance.tui.state import DashboardState, Phase, is_running, reduce
from appliance.tui.timeline import Timeline
from appliance.tui.view import View
from appliance.tui.wire import Spans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rich.console import RenderableType
    from textual._compositor import CompositorUpdate
    from textual.filter import LineFilter
    from textual.screen import Screen

    from appliance.tui.recording import Recorder
    from appliance.tui.state import FeedItem

FRAMES_PER_SECOND = 5
TABLE_SECONDS = 1.0


class Feed(Protocol):
    """Where events come from.

    Attributes:
        name: what to call it on the screen.
    """

    name: str

    async def follow(self, publish: Callable[[FeedItem], None]) -> None:
        """Publish events until there are no more."""
        ...


class DashboardApp(Looking, App[None]):
    """Follows one feed and paints what it says, never faster than the eye needs.

    Args:
        feed: where the events come from.
        controls: of the same server; None where nothing can be asked, as in a recording.
        recorder: writes down what comes.
        display: what the terminal can show.
    """

    TITLE = "appliance top"
    # A page is in the way of none: each is a screen of its own.
    MODES = {  # noqa: RUF012  (typed by Textual)
        "overview": Overview, "map": MapPage, "requests": RequestsPage, "model": ModelPage,
        "log": LogPage,
    }  # fmt: skip
    DEFAULT_MODE = "overview"

    def __init__(
        self,
        feed: Feed,
        *,
        controls: Controls | None = None,
        recorder: Recorder | None = None,
        display: Display = Display(),  # noqa: B008  (frozen)
    ) -> None:
        super().__init__()
        self._feed, self._controls, self._recorder = feed, controls, recorder
        self._display_of = display
        self._timeline = Timeline()
        self._painted: tuple[object, ...] = ()
        self._next_panels = 0.0
        self.state = DashboardState()
        self.look = Look()
        if display.system is not None:
            # The console is made by Textual, which lets only the environment choose.
            self.console._color_system = display.system
        self._use_scheme(display.theme)

    @property
    def depth(self) -> ColorSystem | None:
        """What is sent to the terminal; None for no colours at all."""
        if self.no_color or self._display_of.colors is Colors.NONE:
            return None
        return self.console._color_system or ColorSystem.TRUECOLOR

    def on_mount(self) -> None:
        """Start to follow and to paint."""
        for theme in palette.THEMES:
            self.register_theme(theme)
        self.theme = palette.theme_name(self._display_of.theme)
        self.run_worker(self._feed.follow(self.take), name="feed")
        if self._controls is not None:
            self.run_worker(self._watch_table(self._controls), name="block table")
        self.set_interval(1 / FRAMES_PER_SECOND, self._frame)

    def on_unmount(self) -> None:
        """Write what is still held back."""
        if self._recorder is not None:
            self._recorder.close()

    def take(self, item: FeedItem) -> None:
        """Take in one item of the feed; what comes between two frames is painted once.

        Raises:
            ValueError: the item makes no sense.
        """
        now = time.monotonic()
        before, self.state = self.state, reduce(self.state, item, now)
        self._timeline.add(item, before, now)
        if self._recorder is not None:
            self._recorder.write(item)
            if self._recorder.failure:
                self.say(self._recorder.failure)
                self._recorder = None

    def view_now(self) -> View:
        """What is shown now."""
        depth = self.depth
        return View(
            url=self._feed.name,
            latest=self.state,
            look=self.look,
            now=time.monotonic(),
            lettered=depth is None or self._display_of.ascii,
            recording=self._recorder is not None,
        )

    def paint(self, *, panels: bool = True) -> None:
        """Bring the screen up to date.

        Args:
            panels: numbers too, not the map alone.
        """
        page = self.screen_stack[0] if self._running and self.screen_stack else None
        if not isinstance(page, Page):
            return  # before the start or after the end
        view = self.view_now()
        if self.look.focus is not None and view.focused is None:
            self.look = replace(self.look, focus=None)  # it ended
            view = self.view_now()
        page.paint(view, panels=panels)

    def _frame(self) -> None:
        """A frame is due: numbers once a second, unless something happened that cannot wait."""
        if not (self._running and self.screen_stack):
            return  # a timer's last tick may come after the last screen is gone
        now = time.monotonic()
        happened = (self.look, self.state.connection, self.state.info, self.screen)
        panels = now >= self._next_panels or happened != self._painted
        if panels:
            self._next_panels = now + 1.0 - 0.5 / FRAMES_PER_SECOND
            self._painted = happened
        self.paint(panels=panels)

    def state_at(self, when: float) -> tuple[DashboardState, float] | None:
        """What was known at a moment of the past, or at the earliest that is still known."""
        begin = self._timeline.begin
        if begin is None:
            return None
        when = max(when, begin)
        state = self._timeline.state_at(when)
        return None if state is None else (state, when)

    def end_request(self, key: SequenceKey) -> None:
        """Ask the server to abort a request, and tell what came of it."""
        if self._controls is None:
            self.say("nothing can be aborted in a recording")
            return
        self.run_worker(self._end_request(self._controls, key), name="abort")

    async def _end_request(self, controls: Controls, key: SequenceKey) -> None:
        try:
            await controls.abort(key.request_id)
        except ControlError as error:
            self.say(f"not aborted: {error}")
        else:
            self.say(f"aborted {key.request_id}")

    async def _watch_table(self, controls: Controls) -> None:
        """Keep the block table of the sequence in focus up to date."""
        while True:
            await asyncio.sleep(TABLE_SECONDS)
            focused, live = self.view_now().focused, self.state.connection.phase is Phase.LIVE
            if focused is None or not live or not is_running(focused) or self.look.held:
                continue
            try:
                self.take(await controls.block_table(SequenceKey.of(focused)))
            except ControlError:
                # It just ended, or the server is too old: the panel then shows what the map tells.
                continue

    def _use_scheme(self, name: str) -> None:
        """Draw in the colours of a theme, as far as the terminal has them."""
        depth = self.depth
        ours: list[LineFilter] = [OnlyAscii()] if self._display_of.ascii else []
        if depth is None:
            ours.append(Colorless())
        elif depth is ColorSystem.STANDARD:
            ours.append(Recolor(SIXTEEN, dim="bright_black"))
        elif SCHEMES[name]:
            ours.append(Recolor(SCHEMES[name]))
        # The first of Textual's own is for its widgets; its way without colours is replaced.
        self._filters = [self._filters[0], *ours]

    def use_theme(self, name: str) -> None:
        """Draw in other colours from now on."""
        if self.depth not in (ColorSystem.TRUECOLOR, ColorSystem.EIGHT_BIT):
            self.say("this terminal has too few colours for themes")
            return
        self._use_scheme(name)
        self.theme = palette.theme_name(name)
        self.refresh(repaint=True, layout=True)
        for widget in self.screen.walk_children():
            widget.refresh()

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """What the command palette offers."""
        for title, text, action in self.commands():
            yield SystemCommand(title, text, action)
        for name in SCHEMES:
            yield SystemCommand(
                f"Theme: {name}", "other colours for all", lambda name=name: self.use_theme(name)
            )

    def _fatal_error(self) -> None:
        """Show on the cleaned terminal what went wrong; local values may be private."""
        error = Traceback(show_locals=False, width=None, suppress=[rich, textual])
        self._exit_renderables.append(error)
        self._close_messages_no_wait()

    def _display(
        self, screen: Screen[Any], renderable: RenderableType | CompositorUpdate | None
    ) -> None:
        """Send what Textual painted, in fewer bytes."""
        if isinstance(renderable, ChopsUpdate):
            renderable = Spans(renderable)
        # Textual itself hands over updates of its compositor, which its annotation leaves out.
        super()._display(screen, cast("RenderableType | None", renderable))
