"""Runs the dashboard and restores the terminal afterwards."""

from __future__ import annotations

import asyncio
import signal
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from textual import constants

from appliance.errors import ConfigError
from appliance.tui.app import DashboardApp
from appliance.tui.client import EventFeed
from appliance.tui.controls import Controls
from appliance.tui.recording import Recorder, ReplayFeed
from appliance.tui.server import Server
from appliance.tui.terminal import DisplaySettings

if TYPE_CHECKING:
    from collections.abc import Callable

_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class TopOptions:
    """Options of `appliance top` besides the server.

    Attributes:
        replay: recording to play instead of following a server.
        colors: value of a `terminal.Colors`.
        theme: key of `scheme.SCHEMES`.
        ca_file: certificates to trust over HTTPS; None for Python's defaults.
    """

    record: Path | None = None
    replay: Path | None = None
    colors: str = "auto"
    theme: str = "dark"
    ca_file: str | None = None


def run_dashboard(
    url: str,
    api_key: str | None,
    options: TopOptions | None = None,
    *,
    while_true: Callable[[], bool] | None = None,
) -> int:
    """Show the dashboard until the user quits, and return the exit code.

    Args:
        url: the server, with or without scheme and `/v1`.
        api_key: the server's key, if it needs one.
        while_true: polled a few times a second; False ends the dashboard.

    Raises:
        ConfigError: an option is invalid, or there is no terminal.
    """
    app = make_app(url, api_key, options or TopOptions())
    return asyncio.run(_show(app, while_true))


def make_app(url: str, api_key: str | None, options: TopOptions) -> DashboardApp:
    """Build a dashboard; raise ConfigError for invalid options or without a terminal."""
    display = DisplaySettings.of(options.colors, options.theme)
    if options.replay is not None:
        if options.record is not None:
            raise ConfigError("--record and --replay exclude each other")
        feed = ReplayFeed(options.replay)
        require_terminal()
        return DashboardApp(feed, display=display)
    server = Server.at(url, api_key, options.ca_file)
    require_terminal()
    live = EventFeed(server)
    recorder = None if options.record is None else Recorder(options.record, live.name)
    return DashboardApp(live, controls=Controls(server), recorder=recorder, display=display)


def require_terminal() -> None:
    """Raise ConfigError if there is no terminal to draw on."""
    # Textual draws on stderr.
    if sys.__stdin__ is None or sys.__stderr__ is None:
        raise ConfigError("appliance top needs a terminal")
    in_browser = constants.DRIVER is not None  # of textual-serve, which draws by itself
    if not (in_browser or (sys.__stdin__.isatty() and sys.__stderr__.isatty())):
        raise ConfigError(
            "appliance top needs a terminal; GET /metrics has the numbers for scripts"
        )


async def _show(app: DashboardApp, while_true: Callable[[], bool] | None) -> int:
    """Run the app until the user quits or a signal ends it; return the exit code."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Textual restores the terminal if the app exits, but not if a signal kills it.
        loop.add_signal_handler(number, partial(app.exit, return_code=128 + number))
    watching = None if while_true is None else asyncio.create_task(_leave(app, while_true))
    await app.run_async()
    if watching is not None:
        watching.cancel()
    return app.return_code or 0


async def _leave(app: DashboardApp, while_true: Callable[[], bool]) -> None:
    while while_true():  # noqa: ASYNC110  (nothing tells when it changes)
        await asyncio.sleep(_POLL_SECONDS)
    app.exit()
