"""`appliance top`: the dashboard."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from appliance.commands.top_in_browsers import show_in_browsers
from appliance.errors import ConfigError


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
    web: Annotated[bool, typer.Option("--web", help="Show it in a browser instead.")] = False,
    web_host: Annotated[str, typer.Option(help="Address for browsers.")] = "127.0.0.1",
    web_port: Annotated[int, typer.Option(help="Port for browsers.")] = 8081,
) -> None:
    """Watch a running server: block map, throughput, requests.

    A key, if the server wants one, comes from the environment variable APPLIANCE_API_KEY. With
    --web, browsers want the same key; without a key only this machine is let in.
    """
    from appliance.config import api_key_from_environment
    from appliance.tui.run import TopOptions, run_dashboard
    from appliance.tui.server import server_url

    key = api_key_from_environment()
    if web:
        if record is not None or replay is not None:
            raise ConfigError("--record and --replay work in a terminal only; leave out --web")
        looks = ("--colors", colors, "--theme", theme)
        show_in_browsers(str(server_url(url)), key, web_host, web_port, looks)
        return
    options = TopOptions(record=record, replay=replay, colors=colors, theme=theme)
    raise typer.Exit(run_dashboard(url, key, options))
