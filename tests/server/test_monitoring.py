"""The shipped dashboard and alerts use metrics that exist, in words that Prometheus reads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.server.promtool import promtool
from typer.testing import CliRunner

from appliance.cli import app
from appliance.docs import read
from appliance.events import Gpu, Machine, QualityFact
from appliance.monitoring import FILES, path_of
from appliance.server.metrics.gpu import REASONS
from appliance.server.models.model_state import ServedCard

if TYPE_CHECKING:
    from tests.server.conftest import Serve

NAME = re.compile(r"\b(?:vllm:|appliance_)[a-z0-9_:]+")
GPU = Gpu(
    name="Imaginary 4090", utilization=0.5, memory_used_bytes=1, memory_total_bytes=2,
    power_watts=100.0, power_limit_watts=450.0, temperature_celsius=60.0, sm_clock_mhz=2520,
    throttled=(REASONS[0][1],), energy_joules=1e6, joules_per_token=1.5,
)  # fmt: skip


def panels() -> list[dict[str, object]]:
    found = json.loads(path_of("grafana").read_text())["panels"]
    assert isinstance(found, list)
    return found


def queries() -> list[str]:
    text = path_of("grafana").read_text()
    return [
        target["expr"]
        for panel in json.loads(text)["panels"]
        for target in panel.get("targets", ())
    ]


async def test_every_metric_that_is_asked_for_exists(serve: Serve) -> None:
    async with serve(
        server={"api_key": "key-of-mine"}, headers={"authorization": "Bearer key-of-mine"}
    ) as running:
        await running.complete("hi", max_tokens=3)
        running.state.quality_card = ServedCard(b"{}", (QualityFact(name="kld_mean", value=0.01),))
        server = running.server
        await server.machine.read()
        assert server.machine.latest is not None
        server.machine.latest = Machine(cpu_cores=2, gpus=(GPU,))
        text = server.metrics.render().decode()
    samples = {
        sample.name for family in text_string_to_metric_families(text) for sample in family.samples
    }
    asked = set(NAME.findall("\n".join([*queries(), path_of("alerts").read_text()])))
    assert len(asked) > 40
    assert asked <= samples
    ours = {name for name in samples if name.startswith(("vllm:", "appliance_"))}
    shown = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in asked}
    unseen = {
        name for name in ours if re.sub(r"_(bucket|sum|count|created)$", "", name) not in shown
    }
    assert len(unseen) < len(ours) / 4, f"the dashboard shows most of what there is, not {unseen}"


async def test_our_own_names_follow_the_rules_for_names(serve: Serve) -> None:
    async with serve() as running:
        await running.complete("hi", max_tokens=3)
        await running.server.machine.read()
        running.server.machine.latest = Machine(cpu_cores=2, gpus=(GPU,))
        text = running.server.metrics.render().decode()
    # vLLM's names have a colon, and the library adds times of creation; we can change neither.
    lines = [line for line in text.splitlines() if "vllm:" not in line and "_created" not in line]
    result = promtool("check", "metrics", text="\n".join(lines) + "\n")
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


def test_prometheus_understands_the_alerts_and_the_settings() -> None:
    result = promtool("check", "rules", str(path_of("alerts")))
    assert result.returncode == 0, result.stderr
    assert "SUCCESS: 14 rules" in result.stdout
    result = promtool("check", "config", "--syntax-only", str(path_of("prometheus")))
    assert result.returncode == 0, result.stderr


def test_alerts_come_when_they_should_and_not_before(tmp_path: Path) -> None:
    test = (Path(__file__).parent / "alerts_test.yml").read_text()
    (tmp_path / "test.yml").write_text(test.replace("RULES", str(path_of("alerts"))))
    result = promtool("test", "rules", str(tmp_path / "test.yml"))
    assert result.returncode == 0, result.stdout + result.stderr
    changed = test.replace('values: "1x5 0x10"', 'values: "1x15"')
    (tmp_path / "test.yml").write_text(changed.replace("RULES", str(path_of("alerts"))))
    assert promtool("test", "rules", str(tmp_path / "test.yml")).returncode != 0


def test_prometheus_understands_every_query_of_the_dashboard(tmp_path: Path) -> None:
    assert len(queries()) > 50
    rules = [
        {"record": f"query:{number}", "expr": expr.replace("$__rate_interval", "5m")}
        for number, expr in enumerate(queries())
    ]
    path = tmp_path / "rules.yml"  # JSON is YAML
    path.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    result = promtool("check", "rules", str(path))
    assert result.returncode == 0, result.stderr


def test_no_panel_lies_on_another() -> None:
    seen: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)
    for panel in panels():
        position = panel["gridPos"]
        assert isinstance(position, dict)
        assert position["x"] + position["w"] <= 24
        cells = {
            (x, y)
            for x in range(position["x"], position["x"] + position["w"])
            for y in range(position["y"], position["y"] + position["h"])
        }
        assert not cells & seen, panel["title"]
        seen |= cells


@pytest.mark.parametrize("name", FILES)
def test_the_command_prints_the_file_as_it_is(name: str) -> None:
    result = CliRunner().invoke(app, ["monitoring", name])
    assert result.exit_code == 0
    assert result.output == path_of(name).read_text()


def test_prometheus_is_told_the_configured_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APPLIANCE_PORT", "9123")
    monkeypatch.setenv("APPLIANCE_HOST", "0.0.0.0")
    output = CliRunner().invoke(app, ["monitoring", "prometheus"]).output
    assert '- targets: ["127.0.0.1:9123"]' in output
    assert "8080" not in output


def test_files_are_called_what_the_documentation_calls_them() -> None:
    called = dict(re.findall(r"appliance monitoring (\w+) > (\S+)", read("operations").text))
    assert called.keys() == FILES.keys()
    for name in FILES:
        mentioned = set(re.findall(r"[\w-]+\.yml", path_of(name).read_text()))
        assert mentioned <= set(called.values()), name
