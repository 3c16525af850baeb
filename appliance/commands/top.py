"""`appliance top`: the dashboard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from appliance.commands.setting_flags import Flags, with_setting_flags
from appliance.config import TopConfig, authority_to_trust, load_section, server_to_watch
from appliance.errors import ConfigError


@with_setting_flags(TopConfig)
def top(
    flags: Flags,
    record: Annotated[Path | None, typer.Option(help="Record the feed to a new file.")] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Play a recording instead of following a server.")
    ] = None,
    web: Annotated[bool, typer.Option("--web", help="Show it in a browser instead.")] = False,
    config: Annotated[
        Path | None, typer.Option(help="TOML file that the server was started with.")
    ] = None,
) -> None:
    """Watch a running server: block map, throughput, requests.

    Address and key are those of the server's own settings, in the environment (APPLIANCE_PORT,
    APPLIANCE_API_KEY) or the configuration file; APPLIANCE_URL names another server. With --web,
    browsers want the same key; without a key only this machine is let in.
    """
    from appliance.tui.run import TopOptions, run_dashboard
    from appliance.tui.server import server_url

    settings = load_section(TopConfig, flags, config)
    url, key = ("", None) if replay is not None else server_to_watch(settings.url, config)
    if web:
        if record is not None or replay is not None:
            raise ConfigError("--record and --replay work in a terminal only; leave out --web")
        extra = ["--colors", settings.colors, "--theme", settings.theme]
        if settings.ca_file is not None:
            extra += ["--ca-file", settings.ca_file]
        if config is not None:
            extra += ["--config", str(config)]  # the file may hold the key
        show_in_browsers(str(server_url(url)), key, settings.web_host, settings.web_port, extra)
        return
    options = TopOptions(
        record=record,
        replay=replay,
        colors=settings.colors,
        theme=settings.theme,
        ca_file=None if replay is not None else authority_to_trust(settings, config),
    )
    raise typer.Exit(run_dashboard(url, key, options))


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
