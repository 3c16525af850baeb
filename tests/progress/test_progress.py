from __future__ import annotations

import pytest

from appliance.progress.progress import ProgressLine


def test_lines_where_no_bar_can_be_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLine() as progress:
        for done in range(0, 101, 10):
            progress("weights", done, 100)
        progress("reading", 0, 0)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split() for line in lines] == [
        ["weights", "0%", "0/100"],
        ["weights", "100%", "100/100"],
        ["reading"],
    ]


def test_a_log_takes_the_lines_and_no_bar_is_drawn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    lines: list[str] = []
    with ProgressLine(lines.append) as progress:
        progress("weights", 3, 3)
    assert [line.split() for line in lines] == [["weights", "100%", "3/3"]]
    assert not capsys.readouterr().err


def test_a_bar_on_a_terminal_ends_its_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with ProgressLine() as progress:
        progress("download", 2**20, 2**21)
        progress("weights", 3, 3)
        progress.close()
    text = capsys.readouterr().err
    assert "50%  1.0 of 2.0 MiB" in text
    assert text.count("\n") == 2
    assert text.endswith("3/3\n")
