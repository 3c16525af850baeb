"""Files for Prometheus and Grafana that know this server's metrics; nothing of ours reads them."""

from __future__ import annotations

from pathlib import Path

FILES = {"grafana": "grafana.json", "alerts": "alerts.yml", "prometheus": "prometheus.yml"}


def path_of(name: str) -> Path:
    """Return the path of one of `FILES`."""
    return Path(__file__).parent / FILES[name]
