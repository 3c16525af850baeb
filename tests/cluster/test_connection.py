"""Errors that end a start before any replica is placed: no Ray, no cluster, a busy port."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.serve
from typer.testing import CliRunner

from appliance.cli import app
from appliance.cluster import control
from appliance.cluster.control import connected
from appliance.config import ServerConfig
from appliance.errors import ConfigError
from appliance.server.http.listener import bind


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ENABLE_AUTO_CONNECT", "0")  # connecting sets it


@pytest.mark.parametrize("missing", ["ray", "ray.serve"])
def test_without_ray_it_says_what_to_install(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=r"not installed here .* pip install 'appliance\[ray\]'"):
        connected(None).__enter__()
    done = CliRunner().invoke(app, ["cluster", "status"])
    assert isinstance(done.exception, ConfigError)


@pytest.mark.parametrize(("address", "where"), [(None, "on this machine"), ("a:1", "at a:1")])
def test_without_a_cluster_it_says_how_to_start_one(
    address: str | None, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(address: str, **_: Any) -> None:
        raise ConnectionError(f"Could not find any running Ray instance for {address}.")

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(ConfigError, match=rf"no Ray cluster {where} .* ray start --head"):
        connected(address).__enter__()


def test_a_port_in_use_is_refused_before_rays_proxies_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray.serve, "status", lambda: SimpleNamespace(proxies={}))
    with bind(ServerConfig(port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} .* in use; .* --port"):
            control.claim_address(ServerConfig(port=port))
    control.claim_address(ServerConfig(port=port))


@pytest.mark.parametrize("bounds", ["3", "4:2", "0:2", "a:b"])
def test_bounds_that_are_no_pair_are_refused(bounds: str) -> None:
    done = CliRunner().invoke(app, ["cluster", "serve", "--autoscale", bounds])
    assert isinstance(done.exception, ConfigError)
    assert "is not MIN:MAX, such as 1:4" in str(done.exception)
