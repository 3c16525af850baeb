"""`appliance top --web`: serves the dashboard to browsers; no command of its own."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from appliance.errors import ConfigError


def show_in_browsers(
    url: str, key: str | None, host: str, port: int, extra: Sequence[str] = ()
) -> None:
    """Serve the dashboard until a signal ends it.

    Raises:
        ConfigError: the extra is not installed, or the address is taken.
    """
    from appliance.config import ServerConfig
    from appliance.server.http.listener import bind, url_of

    try:
        from appliance.server.dashboard.web_dashboard import WebDashboard
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--web needs {error.name}; install it with: pip install 'appliance[web]'"
        ) from error
    config = ServerConfig(host=host, port=port, api_key=key)
    dashboard = WebDashboard(("--url", url, *extra), config)
    with bind(config) as sock:
        typer.echo(f"the dashboard of {url} is at {url_of(config, sock)}/", err=True)
        dashboard.run(sock)
