"""A run that was killed, interrupted or out of space resumes, with the same result."""

from __future__ import annotations

import errno
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from appliance.errors import ChangedRunError, QuantizeError
from appliance.progress.quantize_events import (
    QuantizeEvent,
    RunEstimated,
    RunFailed,
    RunPlanned,
    Start,
    UnitFinished,
    decode_event,
)
from appliance.quant.formats.scheme import TrellisScheme, WeightScheme
from appliance.quant.run.options import Method, QuantizeOptions, WeightFormat
from appliance.quant.run.pipeline import quantize_model, what_is_kept
from appliance.quant.run.run import Journal
from appliance.quant.run.staging import StagingFolders
from appliance.quant.run.writing import UnitWriter
from appliance.quant.text.calibration import CalibrationText
from appliance.quant.walk import stream

MakeFolder = Callable[..., Path]
RUNNER = Path(__file__).parents[2] / "support" / "support" / "quant" / "killed_runs.py"
SCHEME = WeightScheme(4, 32, False)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def options(text: Path, method: Method = Method.GPTQ, **changes: Any) -> QuantizeOptions:
    rows = CalibrationText(text, num_tokens=480, row_tokens=48, seed=changes.pop("seed", 0))
    return QuantizeOptions(changes.pop("scheme", SCHEME), method, rows, overwrite=True, **changes)


class Stop(Exception):  # noqa: N818
    """Represents anything that ends a run: it is no error of ours, so the work is kept."""


def stop_after(unit: str) -> Callable[[QuantizeEvent], None]:
    def stop(event: QuantizeEvent) -> None:
        if isinstance(event, UnitFinished) and event.name == unit:
            raise Stop

    return stop


def begin(model: Path, out: Path, asked: QuantizeOptions, *, until: str = "layer 0") -> None:
    """Leave an unfinished run."""
    with pytest.raises(Stop):
        quantize_model(model, out, asked, stop_after(until))


def units_of_run(model: Path, out: Path, asked: QuantizeOptions) -> list[str]:
    """Finish a run; return what it did."""
    events: list[QuantizeEvent] = []
    quantize_model(model, out, asked, events.append)
    return [event.name for event in events if isinstance(event, UnitFinished)]


Run = tuple[str, str, int, Path]  # method, where it is killed, seed, destination


def runs_of(folder: Path, *methods: str, seeds: int = 2) -> list[Run]:
    runs = itertools.product(methods, ("writes", "moments"), range(seeds))
    return [(*run, folder / "{}-{}{}".format(*run) / "out") for run in runs]


def kill_until_done(model: Path, text: Path, runs: list[Run]) -> list[dict[str, Any]]:
    """Run each until it is done, killed again and again; return what `killed_runs.py` prints."""
    for *_, out in runs:
        out.parent.mkdir()
    words = [":".join(map(str, run)) for run in runs]
    command = [sys.executable, str(RUNNER), str(model), str(text), *words]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for *_, out in runs:
        assert {path.name for path in out.parent.iterdir()} <= {"out", "trace", "moments"}
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(
    model: Path, text: Path, tmp_path: Path
) -> None:
    methods = ("rtn", "awq+gptq")
    whole = {
        method: contents(
            quantize_model(model, tmp_path / method, options(text, Method(method))).out
        )
        for method in methods
    }
    runs = runs_of(tmp_path, *methods)
    kills: Counter[tuple[str, str]] = Counter()
    for (method, how, _, out), found in zip(runs, kill_until_done(model, text, runs), strict=True):
        assert contents(out) == whole[method]
        kills[method, how] += found["kills"]
        if method == "rtn":
            continue
        life = " ".join(found["layers"]).split("published")[0].split()
        assert sorted(set(life)) == ["0", "1"]
        assert len(life) <= 2 + found["kills"], "at most a layer is repeated for each kill"
        assert life == sorted(life), "and never one that was done"
    assert len(kills) == 4
    assert min(kills.values()) > 2, kills


def test_a_trellis_whose_run_was_killed_has_the_same_bytes(
    make_llama: MakeFolder, model: Path, text: Path, tmp_path: Path
) -> None:
    """Slopes are measured before the first layer, in files of their own."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 1, "head_dim": 64}
    wide = make_llama("wide", **sizes)
    (wide / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    (wide / "chat_template.jinja").unlink()
    asked = options(text, Method.TRELLIS, scheme=TrellisScheme(2), format=WeightFormat.TRELLIS)
    whole = contents(quantize_model(wide, tmp_path / "whole", asked).out)
    runs = runs_of(tmp_path, "trellis", seeds=1)
    kills: Counter[str] = Counter()
    for (_, how, _, out), found in zip(runs, kill_until_done(wide, text, runs), strict=True):
        assert contents(out) == whole
        kills[how] += found["kills"]
    assert min(kills["writes"], kills["moments"]) > 2, kills


@pytest.mark.parametrize("method", [Method.RTN, Method.GPTQ])
def test_what_is_done_is_not_done_again(
    model: Path, text: Path, tmp_path: Path, method: Method
) -> None:
    out, asked = tmp_path / "out", options(text, method)
    begin(model, out, asked)
    assert not out.exists()
    (_, *left) = units_of_run(model, tmp_path / "whole", asked)
    done = units_of_run(model, out, asked)
    assert "layer 0" not in done
    assert set(done) == set(left) - {"layer 0"}
    assert contents(out) == contents(tmp_path / "whole")
    assert not list(tmp_path.glob(".*"))


def test_the_report_and_the_events_count_both_runs(model: Path, text: Path, tmp_path: Path) -> None:
    out, asked = tmp_path / "out", options(text)
    whole = quantize_model(model, tmp_path / "whole", asked)
    begin(model, out, asked)
    lines = (tmp_path / ".out.partial/state/events.jsonl").read_text().splitlines()
    kinds = [type(decode_event(line)) for line in lines]
    assert kinds == [RunEstimated, Start, RunPlanned, UnitFinished, RunFailed]
    events: list[QuantizeEvent] = []
    report = quantize_model(model, out, asked, events.append)
    assert isinstance(events[0], Start)
    assert (events[0].units_done, events[0].units) == (1, 5)
    assert report.losses == whole.losses
    assert len(report.losses) == 8


def test_the_text_need_not_be_there_again(model: Path, text: Path, tmp_path: Path) -> None:
    out, asked = tmp_path / "out", options(text)
    whole = quantize_model(model, tmp_path / "whole", asked).out
    begin(model, out, asked)
    text.rename(tmp_path / "elsewhere")
    quantize_model(model, out, asked)
    assert contents(out) == contents(whole)


def change_model(model: Path, _: Path) -> None:
    path = model / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def change_text(_: Path, text: Path) -> None:
    for path in text.glob("*.txt"):
        path.write_text(path.read_text()[::-1])


CHANGES: dict[str, tuple[Callable[[Path, Path], None] | None, dict[str, Any], str]] = {
    "the model": (change_model, {}, r"model file model\.safetensors has changed"),
    "the text": (change_text, {}, "the calibration text has changed"),
    "the seed": (None, {"seed": 1}, "text seed was 0, now 1"),
    "the scheme": (None, {"scheme": WeightScheme(4, 64)}, "scheme group_size was 32, now 64"),
    "the method": (None, {"method": Method.AWQ}, "method was gptq, now awq"),
    "the shards": (None, {"max_shard_bytes": 9999}, "max_shard_bytes was 4294967296, now 9999"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_has_changed_is_named_and_nothing_is_lost(
    model: Path, text: Path, tmp_path: Path, case: str
) -> None:
    change, changes, message = CHANGES[case]
    out, asked = tmp_path / "out", options(text)
    begin(model, out, asked)
    if change is not None:
        change(model, text)
    with pytest.raises(ChangedRunError, match=message) as caught:
        quantize_model(model, out, options(text, **changes))
    assert "--restart" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(Journal(StagingFolders(out).state).records) == 1
    again = options(text, **changes, restart=True)
    assert "layer 0" in units_of_run(model, out, again)
    fresh = quantize_model(model, tmp_path / "fresh", options(text, **changes)).out
    assert contents(out) == contents(fresh)


def test_another_torch_would_compute_something_else(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, asked = tmp_path / "out", options(text)
    begin(model, out, asked)
    monkeypatch.setattr(torch, "__version__", "3.0.0")
    with pytest.raises(ChangedRunError, match=r"torch was .*, now 3\.0\.0"):
        quantize_model(model, out, asked)


def test_where_it_runs_and_how_much_memory_it_may_take_is_no_change(
    model: Path, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    begin(model, out, options(text))
    assert "layer 0" not in units_of_run(model, out, options(text, max_ram=64 << 30))


def test_an_unfinished_run_of_which_nothing_is_done_is_in_nobodys_way(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(UnitWriter, "round", interrupted)
        with pytest.raises(KeyboardInterrupt):
            quantize_model(model, out, options(text, Method.RTN))
    assert not list(tmp_path.glob(".*"))
    assert what_is_kept(out) == "nothing was left there"


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("method", [Method.RTN, Method.GPTQ])
def test_a_full_disk_at_any_write_loses_nothing(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: Method
) -> None:
    """Whatever fails, the second run gives the same bytes, and reuses what was done."""
    asked = options(text, method)
    whole = quantize_model(model, tmp_path / "whole", asked).out
    kept = 0
    for failing in itertools.count(1, 9):
        out, calls, done, message = tmp_path / f"out{failing}", 0, 0, ""

        def counted(function: Callable[..., Any], failing: int = failing) -> Callable[..., Any]:
            def change(*arguments: Any, **keywords: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls >= failing:
                    full()
                return function(*arguments, **keywords)

            return change

        def count(event: QuantizeEvent) -> None:
            nonlocal done
            done += isinstance(event, UnitFinished)

        with monkeypatch.context() as patch:
            for owner, name in ((os, "fsync"), (os, "pwrite"), (os, "posix_fallocate")):
                patch.setattr(owner, name, counted(getattr(owner, name)))
            patch.setattr(stream, "write_all", counted(stream.write_all))
            try:
                quantize_model(model, out, asked, count)
            except QuantizeError as error:
                message = str(error)
        if calls < failing:
            assert contents(out) == contents(whole)
            break
        assert "No space left on device" in message
        assert "\n" not in message
        assert ("finished parts are kept" in message) == bool(done)
        assert len(units_of_run(model, out, asked)) == 5 - done
        kept += bool(done)
        assert contents(out) == contents(whole)
    assert kept > 2


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_small_disk_is_full_before_anything_is_done(
    model: Path, text: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "none", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no file systems can be mounted here")
    try:
        with pytest.raises(QuantizeError, match=r"MiB free; make room|No space left"):
            quantize_model(model, disk / "out", options(text))
        assert not list(disk.iterdir())
    finally:
        subprocess.run(["umount", disk], check=True)


def test_two_runs_at_once_are_told_apart(model: Path, text: Path, tmp_path: Path) -> None:
    out, asked = tmp_path / "out", options(text)
    refusals = []

    def try_too(event: QuantizeEvent) -> None:
        if isinstance(event, UnitFinished):
            with pytest.raises(QuantizeError, match="another process is writing") as caught:
                quantize_model(model, out, asked)
            refusals.append(caught)

    quantize_model(model, out, asked, try_too)
    assert len(refusals) == 5


def test_a_weight_that_is_not_finite_leaves_nothing_to_go_on_from(
    make_llama: MakeFolder, tmp_path: Path
) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    broken = torch.full((96, 128), torch.nan, dtype=torch.bfloat16)
    model = make_llama("broken", tensors={name: broken})
    with pytest.raises(QuantizeError, match=name):
        quantize_model(model, tmp_path / "out", QuantizeOptions(SCHEME))
    assert not list(tmp_path.glob(".*"))
