"""`appliance quantize` as a person uses it: signals, events, displays."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from support.models.large_model import LETTERS, write_large_model

from appliance.cli import main
from appliance.commands.quantize import tell_job
from appliance.commands.quantize_display import PlainDisplay, TerminalDisplay
from appliance.errors import ConfigError
from appliance.progress.jobs import JobFile, read_jobs
from appliance.progress.quantize_events import (
    CardWritten,
    Done,
    Measuring,
    QuantizeEvent,
    RunEstimated,
    RunFailed,
    RunPlanned,
    Start,
    StepStarted,
    TensorClass,
    UnitFinished,
    Written,
    decode_event,
    encode_event,
)
from appliance.quant.run.options import choose_device

START = Start(
    model="m", out="o", architecture="llama", method="gptq", scheme="4 bits", units=5,
    units_done=0, weight_bytes=10**6,
)  # fmt: skip
PLAN = RunPlanned(
    peak_ram=300 << 20, peak_vram=0, disk_bytes=1 << 20, seconds=200, measured=True,
    classes=(TensorClass(tensors="head", count=1, form="16 bits", nbytes=2 << 20),),
    notes=("it grows",),
)  # fmt: skip
UNIT = UnitFinished(
    name="layer 3", done=4, total=5, seconds=2.5, losses={"a": 0.01, "b": 0.03},
    notes=("3 of 4 inputs were 0",), bytes_done=5, bytes_total=10, remaining_seconds=4000,
    ram=200 << 20, peak_ram=300 << 20, vram=1 << 20, peak_vram=2 << 20,
)  # fmt: skip
DONE = Done(
    out="o", seconds=1.0, weight_bytes=10, bits_per_weight=4.5, peak_ram=1, peak_vram=0, notes=()
)
ALL: list[QuantizeEvent] = [
    StepStarted(what="choosing"),
    RunEstimated(method="gptq", form="4 bits", writing=40, weights=200, card=60, cores=2),
    START,
    PLAN,
    UNIT,
    Written(weight_bytes=5),
    DONE,
    CardWritten(path="quality.json", kld_mean=0.02, same_top_percent=91.5),
    Measuring(stage="evaluating layers", done=2, total=30),
    RunFailed(message="x", units_done=2),
]


@pytest.mark.parametrize("event", ALL, ids=lambda event: type(event).__name__)
def test_events_are_read_as_they_were_written(event: QuantizeEvent) -> None:
    line = encode_event(event)
    assert b"\n" not in line
    assert decode_event(line) == event


def test_lines_say_loss_time_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    with PlainDisplay() as display:
        for event in ALL:
            display(event)
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.splitlines() == [
        "  choosing",
        "  gptq, 4 bits: about 5 min 00 s on 2 cores (text 40 s, weights 3 min 20 s, card 60 s)",
        "  llama, gptq, 4 bits: 5 parts",
        "  1 head: 16 bits, 2.0 MiB",
        "  memory: 300 MiB at most, as measured",
        "  disk: 2.0 MiB, and 1.0 MiB until the end",
        "  time: about 3 min 20 s",
        "  note: it grows",
        "  layer 3 (4 of 5): loss 2.00e-02, at most 3.00e-02, 2.5 s, 1 h 06 min left,"
        " RAM 200 MiB (most 300), VRAM 1 MiB (most 2)",
        "  note: 3 of 4 inputs were 0",
    ]


def test_a_terminal_shows_the_latest_layers_and_a_bar() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, color_system=None)
    with TerminalDisplay(console) as display:
        for event in ALL:
            display(event)
    shown = stream.getvalue()
    for part in (
        "layer 3",
        "loss 2.00e-02",
        "4 of 5",
        "1 h 06 min left",
        "most 300",
        "inputs were",
    ):
        assert part in shown


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == "cpu"
    with pytest.raises(ConfigError, match="no NVIDIA GPU was found"):
        choose_device("cuda")
    with pytest.raises(ConfigError, match="not auto, cpu or cuda"):
        choose_device("tpu")


def test_a_dashboard_is_told_stage_part_loss_and_time(tmp_path: Path) -> None:
    told = []
    with JobFile(tmp_path, "quantize tiny") as job:
        for event in ALL:
            tell_job(job, event)
            told += [one for one in read_jobs(tmp_path).values() if one not in told]
    assert [(one.stage, one.done, one.total) for one in told] == [
        ("choosing", 0, 0),
        ("trying the largest layer", 0, 0),
        ("quantizing", 5, 10),
        ("finishing the files", 0, 0),
        ("quality card, evaluating layers", 2, 30),
    ]
    layer, card = told[2], told[4]
    assert (layer.part, layer.parts_done, layer.parts_total) == ("layer 3", 4, 5)
    assert layer.loss == pytest.approx(0.02)
    assert layer.seconds_left == 4000
    assert (card.parts_done, card.parts_total, card.loss) == (2, 30, None)


RunHere = Callable[..., tuple[int, list[str], list[str]]]


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunHere:
    """Run the command in this process, which has imported everything; return its lines."""

    def run(*arguments: str) -> tuple[int, list[str], list[str]]:
        monkeypatch.setattr(sys, "argv", ["appliance", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        output, errors = capsys.readouterr()
        return ended.value.code, output.splitlines(), errors.splitlines()

    return run


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """Quantize a model of many layers, with JSON lines as output."""
    write_large_model(tmp_path / "model", hidden=128, middle=256, layers=16, vocab=50)
    (tmp_path / "text.txt").write_text(LETTERS * 800)
    return [
        "quantize", str(tmp_path / "model"),
        "--out", str(tmp_path / "out"), "--method", "gptq", "--json",
        "--calibration", str(tmp_path / "text.txt"), "--calibration-tokens", "1024",
        "--card-tokens", "64",
    ]  # fmt: skip


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Restore SIGINT: a shell's background jobs, and processes that they start, ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted(command: list[str], number: signal.Signals, code: int) -> RunFailed:
    """Run the command, and end it by a signal once two parts are done."""
    process = subprocess.Popen(
        [sys.executable, "-m", "appliance", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if sum(isinstance(decode_event(line), UnitFinished) for line in lines) == 2:
            process.send_signal(number)
            break
    output, errors = process.communicate(timeout=300)
    assert process.returncode == code, errors
    (last,) = errors.splitlines()
    assert "finished parts are kept in" in last
    assert "Traceback" not in errors
    failed = decode_event(output.splitlines()[-1])
    assert isinstance(failed, RunFailed)
    assert failed.units_done >= 2
    return failed


@pytest.mark.usefixtures("interruptible")
def test_the_next_run_goes_on_where_ctrl_c_ended_one(
    command: list[str], run_here: RunHere, tmp_path: Path
) -> None:
    failed = interrupted(command, signal.SIGINT, 130)
    status, told, said = run_here(*command)
    assert status == 0, said
    events = [decode_event(line) for line in told]
    assert isinstance(events[0], Start)
    assert events[0].units_done == failed.units_done
    assert [type(event) for event in events if isinstance(event, Done | CardWritten)] == [
        Done,
        CardWritten,
    ]
    made = events[-1]
    assert isinstance(made, CardWritten)
    assert json.loads(Path(made.path).read_bytes())["comparison"]
    assert f"mean KLD {made.kld_mean:.4f}" in "\n".join(said)
    assert "quantized 112 weights" in "\n".join(said)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out", "text.txt"]


def test_a_service_that_is_stopped_keeps_what_is_done_too(
    command: list[str], tmp_path: Path
) -> None:
    interrupted(command, signal.SIGTERM, 143)
    kept = {path.name for path in tmp_path.iterdir()} - {"model", "text.txt"}
    assert kept, "for the next run"


def test_a_dry_run_prints_the_plan(command: list[str], run_here: RunHere, tmp_path: Path) -> None:
    status, (line,), said = run_here(*command, "--dry-run", "--max-ram", "8GiB")
    assert status == 0, said
    plan = json.loads(line)
    assert plan["event"] == "plan"
    assert plan["measured"]
    assert not (tmp_path / "out").exists()


def test_a_ceiling_that_is_too_low_is_one_line(command: list[str], run_here: RunHere) -> None:
    status, (*_, last), (line,) = run_here(*command, "--max-ram", "50MiB")
    assert status == 4
    assert "MiB would do" in line
    assert isinstance(decode_event(last), RunFailed)


def test_a_name_is_found_for_the_result(
    command: list[str], run_here: RunHere, tmp_path: Path
) -> None:
    place = command.index("--out")
    unnamed = [*command[:place], *command[place + 2 :]]
    place = unnamed.index("--method")
    unnamed = [*unnamed[:place], *unnamed[place + 2 :], "--no-card"]
    status, told, said = run_here(*unnamed)
    assert status == 0, said
    assert said[0] == f"the result will be {tmp_path / 'model-4bit'}; --out names another folder"
    assert (tmp_path / "model-4bit" / "config.json").is_file()
    times = [event for event in map(decode_event, told) if isinstance(event, RunEstimated)]
    assert [time.method for time in times] == ["awq+gptq"]
    assert times[0].weights > 0
    assert times[0].writing == times[0].card == 0, "a text was given, and no card asked for"
    status, _, (*_, last) = run_here(*unnamed)
    assert status != 0
    assert "--overwrite" in last


def test_haste_and_a_text_contradict_each_other(command: list[str], run_here: RunHere) -> None:
    place = command.index("--method")
    status, _, (*_, last) = run_here(*command[:place], *command[place + 2 :], "--fast")
    assert status == 2
    assert "--fast reads no text; leave it or --calibration out" in last
