"""`appliance top`: attaches to a running server over HTTP and shows its memory breathe.

Loads neither torch nor the engine: all it knows comes through the event feed.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING

from textual import constants
from textual.app import App

from appliance.errors import ConfigError
from appliance.tui.client import EventFeed
from appliance.tui.palette import THEME
from appliance.tui.screens.dashboard import DashboardScreen
from appliance.tui.state import DashboardState, reduce

if TYPE_CHECKING:
    from appliance.tui.state import FeedItem

FRAMES_PER_SECOND = 5


class DashboardApp(App[None]):
    """Follows one feed and paints what it says, never faster than the eye needs.

    Args:
        feed: where the events come from.
    """

    TITLE = "appliance top"
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, feed: EventFeed) -> None:
        super().__init__()
        self._feed = feed
        self._dashboard = DashboardScreen(str(feed.url).rstrip("/"))
        self.state = DashboardState()

    def get_default_screen(self) -> DashboardScreen:
        """The dashboard is the only screen below the help."""
        return self._dashboard

    def on_mount(self) -> None:
        """Start to follow and to paint."""
        self.register_theme(THEME)
        self.theme = THEME.name
        self.run_worker(self._feed.follow(self.take), name="feed")
        self.set_interval(1 / FRAMES_PER_SECOND, self.paint)

    def take(self, item: FeedItem) -> None:
        """Take in one item of the feed; what comes between two frames is painted once.

        Raises:
            ValueError: the item makes no sense.
        """
        self.state = reduce(self.state, item)

    def paint(self) -> None:
        """Bring the screen up to date."""
        self._dashboard.paint(self.state)


def run_dashboard(url: str, api_key: str | None) -> int:
    """Show the dashboard of a server until the person quits.

    Args:
        url: the server, with or without scheme and `/v1`.
        api_key: the server's key, if it wants one.

    Returns:
        What the process should exit with.

    Raises:
        ConfigError: the address is none, or there is no terminal to draw on.
    """
    app = DashboardApp(EventFeed(url, api_key))
    # Textual draws on the error stream, so that is the one that must be a terminal.
    if sys.__stdin__ is None or sys.__stderr__ is None:
        raise ConfigError("appliance top needs a terminal")
    in_browser = constants.DRIVER is not None  # of textual-serve, which draws by itself
    if not (in_browser or (sys.__stdin__.isatty() and sys.__stderr__.isatty())):
        raise ConfigError(
            "appliance top needs a terminal; GET /metrics has the numbers for scripts"
        )
    asyncio.run(_run(app))
    return app.return_code or 0


async def _run(app: DashboardApp) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Textual gives the terminal back when the app exits, but not when a signal ends it.
        loop.add_signal_handler(number, partial(app.exit, return_code=128 + number))
    await app.run_async()
