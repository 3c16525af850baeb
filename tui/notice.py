"""The notice shown instead of the block map while there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.tui.state import ConnectionPhase

if TYPE_CHECKING:
    from appliance.tui.view import View


def notice(view: View) -> list[str]:
    """Return the notice's lines, the first as a heading; empty if there is a map."""
    connection, info = view.latest.connection, view.state.info
    if view.state.blocks is not None and (info is None or info.state not in ("failed", "asleep")):
        return []
    match connection.phase:
        case ConnectionPhase.CONNECTING:
            return [f"Connecting to {view.url}"]
        case ConnectionPhase.LIVE:
            return _engine(view)
        case ConnectionPhase.LOST:
            heading = f"No connection to {view.url}"
        case ConnectionPhase.NO_KEY:
            heading = f"{view.url} needs a key"
        case ConnectionPhase.UNAUTHORIZED:
            heading = f"{view.url} wants another key"
        case ConnectionPhase.ENDED:
            return ["The recording holds no block map", connection.reason]
        case ConnectionPhase.FOREIGN:
            heading = f"{view.url} is not an appliance"
    return [heading, connection.reason, "", view.retry_words]


def _engine(view: View) -> list[str]:
    info = view.state.info
    if info is None:
        return ["Connected", "waiting for the server to describe its engine"]
    match info.state:
        case "failed":
            return ["The engine failed", info.reason]
        case "asleep":
            return [f"{info.model} sleeps", "The next request wakes it; looking does not."]
        case "ready":
            return ["Connected", "waiting for the first block map"]
        case state:
            return [f"{info.model} is {state}", info.reason]
