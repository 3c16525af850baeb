"""`appliance top`: the dashboard."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def top(
    url: Annotated[
        str, typer.Option(help="The server to watch; of other makes, their metrics.")
    ] = "http://127.0.0.1:8080",
    record: Annotated[Path | None, typer.Option(help="Write all that comes to a new file.")] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Play a recording instead of asking a server.")
    ] = None,
    colors: Annotated[str, typer.Option(help="auto, truecolor, 256, 16 or none.")] = "auto",
    theme: Annotated[str, typer.Option(help="dark, black or light.")] = "dark",
) -> None:
    """Watch a running server: block map, throughput, requests.

    A key, if the server wants one, comes from the environment variable APPLIANCE_API_KEY.
    """
    from appliance.config import api_key_from_environment
    from appliance.tui.run import TopOptions, run_dashboard

    options = TopOptions(record=record, replay=replay, colors=colors, theme=theme)
    raise typer.Exit(run_dashboard(url, api_key_from_environment(), options))
