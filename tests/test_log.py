from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from datetime import datetime

import pytest

from appliance import log
from appliance.log import MAX_RECENT, RecentWarnings, RepeatedWarningFilter


@pytest.fixture(autouse=True)
def the_logger_as_before() -> Iterator[None]:
    logger = logging.getLogger("appliance")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before


def test_warnings_and_errors_are_kept_and_nothing_less() -> None:
    recent = log.configure("info")
    logger = logging.getLogger("appliance.part")
    logger.info("quiet")
    logger.warning("loud: %d", 3)
    logger.error("louder")
    assert [(line.level, line.source, line.message) for line in recent.lines] == [
        ("WARNING", "appliance.part", "loud: 3"),
        ("ERROR", "appliance.part", "louder"),
    ]
    assert recent.total == 2
    assert [line.message for line in recent.take()] == ["loud: 3", "louder"]
    assert recent.take() == ()


def test_a_line_of_json_has_all_of_a_record_and_its_fields(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log.configure("warning", "json")
    assert log.configured() == ("warning", "json")
    logger = logging.getLogger("appliance.part")
    logger.info("quiet")
    logger.warning("loud:\n%d", 3, extra={"fields": {"status": 200}})
    try:
        raise ValueError("planted")
    except ValueError:
        logger.exception("broken")
    loud, broken = map(json.loads, capsys.readouterr().err.splitlines())
    assert datetime.fromisoformat(loud.pop("time")).tzinfo is not None
    assert loud == {
        "level": "warning", "source": "appliance.part", "message": "loud:\n3", "status": 200
    }  # fmt: skip
    assert broken["message"] == "broken"
    assert "ValueError: planted" in broken["exception"]


def test_lines_of_text_are_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("debug")
    assert log.configured() == ("debug", "text")
    logging.getLogger("appliance.part").debug("a\nb")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("DEBUG   appliance.part: a\\nb")


def test_only_the_latest_are_kept() -> None:
    recent = RecentWarnings()
    for number in range(MAX_RECENT + 7):
        record = logging.LogRecord("appliance", logging.ERROR, "", 0, "%d", (number,), None)
        recent.emit(record)
    assert recent.total == MAX_RECENT + 7
    assert len(recent.lines) == MAX_RECENT
    assert recent.lines[0].message == "7"


def test_what_strangers_bring_about_is_said_once_in_a_while() -> None:
    now = 100.0
    sparing = RepeatedWarningFilter(60.0, clock=lambda: now)
    passed: list[str] = []

    def say(text: str, *args: object, level: int = logging.WARNING) -> None:
        record = logging.LogRecord("uvicorn.error", level, "", 0, text, args, None)
        if sparing.filter(record):
            passed.append(record.getMessage())

    for number in range(500):
        say("bad request")
        say("%d connections", number)
    assert passed == ["bad request", "0 connections"]
    say("a bug", level=logging.ERROR)
    say("a bug", level=logging.ERROR)
    assert passed[2:] == ["a bug", "a bug"]
    now += 60
    say("bad request")
    say("%d connections", 7)
    assert passed[4:] == [
        "bad request (499 more like it before)",
        "7 connections (499 more like it before)",
    ]
    for number in range(1000):
        say(f"kind {number}")
    assert len(passed) == 6 + 1000
    say("kind 999")
    assert len(passed) == 6 + 1000
    say("kind 0")
    assert len(passed) == 6 + 1000 + 1, "the first ones are forgotten"
