"""`appliance monitoring`: prints a file for Prometheus or Grafana."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from appliance.config import ServerConfig, load_section, local_url
from appliance.monitoring import path_of


class MonitoringFile(Enum):
    GRAFANA = "grafana"
    ALERTS = "alerts"
    PROMETHEUS = "prometheus"


def monitoring(
    file: Annotated[
        MonitoringFile,
        typer.Argument(help="Dashboard (JSON), alert rules (YAML) or scrape settings (YAML)."),
    ],
) -> None:
    """Print a Grafana dashboard, or alert rules or scrape settings for Prometheus.

    README calls the files grafana.json, appliance-alerts.yml and prometheus.yml.
    """
    text = path_of(file.value).read_text(encoding="utf-8")
    if file is MonitoringFile.PROMETHEUS:
        text = text.replace(_target(ServerConfig()), _target(load_section(ServerConfig, {})))
    typer.echo(text, nl=False)


def _target(server: ServerConfig) -> str:
    """Return the address for Prometheus to scrape."""
    return local_url(server.host, server.port).partition("://")[2]
