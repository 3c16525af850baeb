"""An engine that hangs, one that is slow, and the time at which the next one starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest
from support.runs.waiting import wait_until

from appliance.engine.nouns.beacon import MAX_NAMES, Beacon, name_of
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.process.quarantine import SECONDS, Quarantine, mark_of
from appliance.engine.process.supervisor import Deaths, SupervisionLimits
from appliance.engine.process.watchdog import (
    LOOKS_TO_DOUBT,
    LOOKS_TO_HANG,
    Signs,
    Verdict,
    Watch,
    read_signs,
)
from appliance.errors import QuarantinedError

PATIENCE = 60


def verdicts(looks: list[tuple[bool, bool, Signs]]) -> list[Verdict]:
    watch = Watch(PATIENCE)
    return [
        watch.look(heard=heard, busy=busy, read=lambda _, signs=signs: signs)  # type: ignore[misc]
        for heard, busy, signs in looks
    ]


def test_one_that_does_nothing_is_doubted_and_then_given_up() -> None:
    found = verdicts([(False, True, Signs())] * (LOOKS_TO_HANG + 1))  # the first one is a start
    alive, doubtful = LOOKS_TO_DOUBT, LOOKS_TO_HANG - LOOKS_TO_DOUBT
    expected = [Verdict.ALIVE] * alive + [Verdict.DOUBTFUL] * doubtful + [Verdict.IDLE]
    assert found == expected


@pytest.mark.parametrize(
    ("heard", "busy", "signs"),
    [
        (True, True, Signs()),
        (False, False, Signs()),
        (False, True, Signs(working=True)),
        (False, True, Signs(waits_for_device=True)),
    ],
    ids=["reports", "has no work", "computes", "waits for a GPU"],
)
def test_one_that_takes_its_time_is_never_doubted(heard: bool, busy: bool, signs: Signs) -> None:
    assert set(verdicts([(heard, busy, signs)] * PATIENCE)) == {Verdict.ALIVE}


def test_one_that_counts_how_far_it_is_may_take_hours() -> None:
    looks = [(False, True, Signs(working=True, progress=n // 50)) for n in range(3600)]
    assert set(verdicts(looks)) == {Verdict.ALIVE}


@pytest.mark.parametrize("signs", [Signs(working=True), Signs(waits_for_device=True)])
def test_one_that_gets_nowhere_is_given_up_in_the_end(signs: Signs) -> None:
    found = verdicts([(False, True, signs)] * (PATIENCE + 1))
    assert found == [Verdict.ALIVE] * PATIENCE + [Verdict.STUCK]


def test_a_sign_of_life_begins_the_count_anew() -> None:
    silent = [(False, True, Signs())] * LOOKS_TO_HANG
    found = verdicts([*silent, (True, True, Signs()), *silent[:-1]])
    assert Verdict.IDLE not in found
    assert found[-1] is Verdict.DOUBTFUL


@pytest.mark.parametrize("busy", [True, False])
def test_one_that_was_stopped_is_given_up_busy_or_not(busy: bool) -> None:
    found = verdicts([(False, busy, Signs(stopped=True))] * LOOKS_TO_HANG)
    assert found[LOOKS_TO_DOUBT - 1] is Verdict.DOUBTFUL
    assert found[-1] is Verdict.STOPPED
    goes_on = [(False, busy, Signs(stopped=True))] * 3 + [(True, busy, Signs())]
    assert verdicts(goes_on)[-1] is Verdict.ALIVE


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    code = "import sys, time; sys.stdin.read(1)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def wait_for_signs(pid: int, beacon: Beacon, expected: Signs) -> None:
    wait_until(lambda: read_signs(pid, beacon, True) == expected, f"{expected} of {pid}")


def test_signs_of_a_process(sleeper: subprocess.Popen[bytes]) -> None:
    beacon, pid = Beacon(), sleeper.pid
    wait_for_signs(pid, beacon, Signs())  # it waits for input
    beacon.advance()
    assert read_signs(pid, beacon, True).progress == 1
    assert sleeper.stdin is not None
    sleeper.stdin.write(b"x")
    sleeper.stdin.flush()
    wait_for_signs(pid, beacon, Signs(working=True, progress=1))
    os.kill(pid, signal.SIGSTOP)
    wait_for_signs(pid, beacon, Signs(stopped=True, progress=1))
    os.kill(pid, signal.SIGCONT)
    wait_for_signs(pid, beacon, Signs(working=True, progress=1))
    with beacon.waiting_for_device():
        assert read_signs(pid, beacon, False) == Signs(progress=1, waits_for_device=True)
    sleeper.kill()
    sleeper.wait()
    assert read_signs(pid, beacon, True) == Signs(progress=1)


def test_what_a_process_waits_for_is_its_work() -> None:
    """A compiler that a step has started is an example."""
    code = f"import subprocess; subprocess.run([{sys.executable!r}, '-c', 'while True: pass'])"
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as process:
        beacon = Beacon()
        wait_for_signs(process.pid, beacon, Signs(working=True))
        os.killpg(process.pid, signal.SIGKILL)


def test_a_beacon_tells_what_a_step_has_started() -> None:
    words = memoryview(bytearray(8 * 512)).cast("Q")
    writer, reader = Beacon(words), Beacon(words.toreadonly())
    assert reader.started() == set()
    writer.start(["a", "b"])
    assert reader.started() == {name_of("a"), name_of("b")}
    writer.start(["c"])
    assert reader.started() == {name_of("c")}
    writer.start(str(number) for number in range(2 * MAX_NAMES))
    assert len(reader.started()) == MAX_NAMES
    writer.start([])
    assert reader.started() == set()


def test_each_death_lets_the_next_engine_wait_longer_up_to_a_limit() -> None:
    now = 0.0
    limits = SupervisionLimits(backoff=1.0, max_backoff=60.0, death_window=600.0)
    deaths = Deaths(limits, clock=lambda: now)
    delays = []
    for _ in range(12):
        delays.append(deaths.count())
        now += delays[-1]
    assert delays[:7] == [0, 1, 3, 7, 15, 31, 60]
    assert set(delays[6:]) == {60}
    now += 601
    assert deaths.count() == 0, "long ago is forgotten"
    for _ in range(1000):
        assert deaths.count() <= 60


def request(*prompt: int, **fields: object) -> Request:
    return Request(
        request_id="r",
        prompt_token_ids=prompt,
        sampling=SamplingParams(),
        **fields,  # type: ignore[arg-type]
    )


def test_the_second_death_of_a_request_refuses_it_for_a_while() -> None:
    now = 0.0
    quarantine = Quarantine(mark_of, clock=lambda: now)
    killer, other = request(1, 2), request(1, 3)
    assert not quarantine.is_suspect(killer)
    quarantine.strike([killer, killer])
    assert quarantine.is_suspect(killer)
    assert not quarantine.is_suspect(other)
    assert len(quarantine) == 0
    again = msgspec.structs.replace(killer, request_id="another", priority=1)
    quarantine.strike([again])
    assert len(quarantine) == 1
    for one in (killer, again):
        with pytest.raises(QuarantinedError, match=r"ends the engine.*for 10 min"):
            quarantine.is_suspect(one)
    assert not quarantine.is_suspect(request(1, 2, owner="anna")), "anna has not asked for it"
    warm = msgspec.structs.replace(killer, sampling=SamplingParams(temperature=0.5))
    assert not quarantine.is_suspect(warm)
    now = SECONDS - 1
    with pytest.raises(QuarantinedError):
        quarantine.is_suspect(killer)
    now = SECONDS
    assert not quarantine.is_suspect(killer)
    assert len(quarantine) == 0


def test_who_comes_to_the_end_is_absolved() -> None:
    quarantine = Quarantine(mark_of, clock=lambda: 0.0)
    for prompt in (1, 2):
        quarantine.strike([request(prompt)])
    quarantine.absolve(request(1))
    assert not quarantine.is_suspect(request(1))
    assert quarantine.is_suspect(request(2))
    for number in range(5000):
        quarantine.strike([request(number, number)])
    assert len(quarantine.strikes) <= 1024
