"""`appliance monitoring`: print a file for Prometheus or Grafana."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from appliance.monitoring import path_of


class MonitoringFile(Enum):
    """What can be printed."""

    GRAFANA = "grafana"
    ALERTS = "alerts"
    PROMETHEUS = "prometheus"


def monitoring(
    file: Annotated[
        MonitoringFile,
        typer.Argument(help="Dashboard (JSON), alert rules (YAML) or scrape settings (YAML)."),
    ],
) -> None:
    """Print a Grafana dashboard, or alert rules or scrape settings for Prometheus."""
    typer.echo(path_of(file.value).read_text(encoding="utf-8"), nl=False)
