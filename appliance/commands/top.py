"""`appliance top`: the dashboard."""

from __future__ import annotations

from typing import Annotated

import typer


def top(
    url: Annotated[str, typer.Option(help="The server to watch.")] = "http://127.0.0.1:8080",
) -> None:
    """Watch a running server: block map, throughput, requests.

    A key, if the server wants one, comes from the environment variable APPLIANCE_API_KEY.
    """
    from appliance.config import api_key_from_environment
    from appliance.tui.app import run_dashboard

    raise typer.Exit(run_dashboard(url, api_key_from_environment()))
