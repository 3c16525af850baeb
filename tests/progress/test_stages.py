from __future__ import annotations

import time

from appliance.progress import stages


def test_stages_add_up_to_the_whole() -> None:
    ends = (("command", 10.2), ("imports", 11.5), ("weights", 11.9))
    found = stages.durations(10.0, ends)
    assert [round(seconds, 6) for seconds in found.values()] == [0.2, 1.3, 0.4]
    assert stages.in_words(10.0, ends) == "1.9 s: command 0.20, imports 1.30, weights 0.40"


def test_what_ended_before_another_stage_began_took_no_time() -> None:
    ends = (("command", 11.0), ("imports", 10.5), ("weights", 11.5))
    assert stages.durations(10.0, ends) == {"command": 1.0, "imports": 0.0, "weights": 0.5}


def test_a_process_knows_when_it_began() -> None:
    assert stages.process_start() < time.monotonic()
    assert abs(stages.process_start() - stages.process_start()) < 0.05
