"""The unit, checked by systemd's own tool; without that tool only its text is checked."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from appliance.service.unit import ServicePlan, unit_text

COMMAND = ("/bin/true", "-P", "-m", "appliance")
PLANS = {
    "system": ServicePlan(COMMAND, ("org/model",)),
    "account": ServicePlan(COMMAND, run_as="root"),
    "user": ServicePlan(COMMAND, is_user=True),
    "hostile": ServicePlan(COMMAND, ("/srv/my models/50% $HOME \"q\" '7'.gguf",)),
}
needs_tool = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="systemd-analyze is not here: neither syntax nor exposure of the unit is judged",
)


def analyze(tmp_path: Path, plan: ServicePlan, *arguments: str) -> subprocess.CompletedProcess[str]:
    unit = tmp_path / "appliance.service"
    unit.write_text(unit_text(plan))
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    return subprocess.run(
        ["systemd-analyze", *arguments, unit], capture_output=True, text=True, env=environment
    )


@needs_tool
@pytest.mark.parametrize("name", PLANS)
def test_systemd_finds_nothing_wrong(name: str, tmp_path: Path) -> None:
    manager = ["--user"] if PLANS[name].is_user else []
    judged = analyze(tmp_path, PLANS[name], "verify", "--man=no", *manager)
    assert (judged.returncode, judged.stderr) == (0, "")


@needs_tool
@pytest.mark.parametrize("name", ["system", "account"])
def test_the_exposure_is_small(name: str, tmp_path: Path) -> None:
    judged = analyze(tmp_path, PLANS[name], "security", "--offline=true", "--threshold=20")
    assert judged.returncode == 0, judged.stdout


@needs_tool
def test_a_wrong_unit_would_be_found(tmp_path: Path) -> None:
    judged = analyze(tmp_path, ServicePlan(("no/path",)), "verify", "--man=no")
    assert judged.stderr


def test_a_command_line_is_one_for_systemd() -> None:
    text = unit_text(PLANS["hostile"])
    assert r"""serve "/srv/my models/50%% $$HOME \"q\" '7'.gguf\"""".removesuffix('\\"') in text
    assert "TimeoutStopSec=105" in unit_text(ServicePlan(COMMAND, drain_timeout=90))


def test_device_files_are_made_after_a_reboot() -> None:
    """systemd.exec(5): DeviceAllow's m is for mknod, and systemd reads numbers as a unit starts."""
    for name, plan in PLANS.items():
        lines = unit_text(plan).splitlines()
        made = lines.index("ExecStartPre=-+/usr/bin/nvidia-modprobe -c0 -u")
        assert made < next(at for at, line in enumerate(lines) if line.startswith("ExecStart="))
        assert ("After=modprobe@nvidia_uvm.service" in lines) == (name != "user")
        assert ("DeviceAllow=char-nvidia-uvm rwm" in lines) == (name != "user")
    assert "CapabilityBoundingSet=" in unit_text(PLANS["system"]).splitlines(), "so without mknod"


def test_each_manager_gets_what_it_can_do() -> None:
    assert "DynamicUser=yes" in unit_text(PLANS["system"])
    assert "User=root" in unit_text(PLANS["account"])
    user = unit_text(PLANS["user"])
    assert "WantedBy=default.target" in user
    assert "LoadCredential" not in user
    assert "User=" not in user
    for plan in PLANS.values():
        assert "Type=notify" in unit_text(plan)
        assert "RestartPreventExitStatus=2 3 4" in unit_text(plan)
