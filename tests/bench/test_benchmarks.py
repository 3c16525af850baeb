"""Every benchmark is listed and starts; the cheapest run to the end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import BENCHMARKS, about, main

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "scripts" / "bench"
CHEAP = {
    "cpu_linears": "--shapes qwen2.5-0.5b-qkv --rows 1 --threads 1 --megabytes 1 --seconds 0.01",
    "cpu_attention": "--shapes smollm2-decode-1x350 --formats int8 --seconds 0.01 --layers 1",
}
# It disables garbage collection and replaces methods, so it gets a process of its own.
HOST_STEP = "host_step --batches 1 --settings greedy drafts --contexts 512 --steps 2"


def start(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["scripts/benchmark", *arguments])
    main()


def test_without_a_name_all_benchmarks_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start(monkeypatch)
    listed = capsys.readouterr().out
    for name in BENCHMARKS:
        assert f"{name} " in listed
        assert 20 < len(about(name)) <= 100
        assert about(name) in listed


def test_every_module_with_a_command_line_is_listed() -> None:
    found = {
        f"{path.parent.name}.{path.stem}"
        for path in BENCH.glob("*/*.py")
        if "parser_of(__doc__)" in path.read_text()
    }
    assert set(BENCHMARKS.values()) == found | {"gpu.command"}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_starts(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        start(monkeypatch, name, "--help")
    assert ended.value.code == 0
    assert "--out" in capsys.readouterr().out


@pytest.mark.parametrize("folder", ["appliance", "kernels", "quant", "tui", "scripts"])
def test_what_names_a_benchmark_names_one_that_exists(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.*"):
        if path.suffix in {".py", ".md", ".c", ".h"}:
            text = path.read_text()
            named = re.findall(r"(?:scripts/|`|: )benchmark ([a-z]\w+)", text)
            assert set(named) <= BENCHMARKS.keys(), path
            assert "scripts/bench_" not in text, path


def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="no benchmark 'speed'"):
        start(monkeypatch, "speed")


@pytest.mark.parametrize("name", CHEAP)
def test_cheap_benchmarks_run_to_their_end(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "result.json"
    start(monkeypatch, name, *CHEAP[name].split(), "--out", str(out))
    assert_measured(name, out)


def test_a_benchmark_runs_to_its_end_by_its_command(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    ran = subprocess.run(
        ["scripts/benchmark", *HOST_STEP.split(), "--out", out],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert_measured("host_step", out)


def assert_measured(name: str, out: Path) -> None:
    result = json.loads(out.read_text())
    assert result["benchmark"] == name
    assert result["conditions"]["commit"]


def test_the_package_is_found_where_the_code_was_only_copied_to(tmp_path: Path) -> None:
    bare = tmp_path / "python"  # without packages, it reports what it would import
    instead = '-P -c "import appliance; print(appliance)"'
    bare.write_text(
        f'#!/bin/sh\ncase "$*" in *bench*) set -- {instead};; esac\nexec {sys.executable} -S "$@"\n'
    )
    bare.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run(
        ["scripts/benchmark"],
        cwd=ROOT,
        env={**environment, "PYTHON": str(bare), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert "appliance/__init__.py" in found.stdout, found.stderr
