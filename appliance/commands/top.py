"""`appliance top`: the dashboard."""

from __future__ import annotations

from typing import Annotated

import typer

from appliance.commands.top_in_browsers import show_in_browsers


def top(
    url: Annotated[str, typer.Option(help="The server to watch.")] = "http://127.0.0.1:8080",
    web: Annotated[bool, typer.Option("--web", help="Show it in a browser instead.")] = False,
    web_host: Annotated[str, typer.Option(help="Address for browsers.")] = "127.0.0.1",
    web_port: Annotated[int, typer.Option(help="Port for browsers.")] = 8081,
) -> None:
    """Watch a running server: block map, throughput, requests.

    A key, if the server wants one, comes from the environment variable APPLIANCE_API_KEY. With
    --web, browsers want the same key; without a key only this machine is let in.
    """
    from appliance.config import api_key_from_environment
    from appliance.tui.app import run_dashboard
    from appliance.tui.client import server_url

    key = api_key_from_environment()
    if web:
        show_in_browsers(str(server_url(url)), key, web_host, web_port)
        return
    raise typer.Exit(run_dashboard(url, key))
