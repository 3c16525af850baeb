"""The limits of each key, with a clock of its own and over HTTP; keys that come and go."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.runs.waiting import until

from appliance.config import ServerConfig
from appliance.config.api_keys import ApiKey, check_keys
from appliance.server.http.errors import RateLimitError
from appliance.server.http.key_ring import SECONDS_BETWEEN_LOOKS, KeyRing
from appliance.server.http.limits import KeyUse

if TYPE_CHECKING:
    import httpx

    from tests.server.conftest import Running, Serve


def known(limits: str) -> Callable[[], dict[str, ApiKey]]:
    keys = check_keys(None, {"anna": f"key-of-anna {limits}", "tim": "key-of-tim"})
    return lambda: keys


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def seconds_refused(use: KeyUse, tokens: int = 1) -> float:
    with pytest.raises(RateLimitError) as caught:
        use.begin("anna", tokens)
    return caught.value.retry_after


def test_a_minute_of_requests_can_be_used_at_once_and_comes_back_evenly() -> None:
    clock = Clock()
    use = KeyUse(known("requests=3"), clock)
    for _ in range(3):
        use.begin("anna", 1).end()
    assert seconds_refused(use) == pytest.approx(20)
    clock.now += 19
    assert seconds_refused(use) == pytest.approx(1)
    clock.now += 1
    use.begin("anna", 1)
    clock.now += 1000
    for _ in range(3):
        use.begin("anna", 1)
    assert seconds_refused(use) == pytest.approx(20), "no more than a minute's worth is saved up"
    use.begin("tim", 1)


def test_tokens_are_counted_as_they_come_and_overdrawn_ones_are_waited_for() -> None:
    clock = Clock()
    use = KeyUse(known("tokens=600"), clock)
    running = use.begin("anna", 500)
    running.take(700)
    assert seconds_refused(use, 100) == pytest.approx(70)
    clock.now += 70
    use.begin("anna", 100)
    clock.now += 60
    use.begin("anna", 10_000), "longer than a minute's tokens: it starts on a full bucket"
    assert seconds_refused(use, 1) == pytest.approx((10_000 - 600 + 1) / 10)


def test_a_limit_that_comes_later_does_not_count_what_was_used_before() -> None:
    clock, limits = Clock(), [""]
    use = KeyUse(lambda: known(limits[0])(), clock)
    use.begin("anna", 1_000_000)
    limits[0] = "tokens=60"
    use.begin("anna", 60)
    assert seconds_refused(use) == pytest.approx(1)


def test_open_requests_are_counted_until_their_end() -> None:
    use = KeyUse(known("parallel=2"))
    first, second = use.begin("anna", 1), use.begin("anna", 1)
    seconds_refused(use)
    first.end()
    first.end()
    third = use.begin("anna", 1)
    seconds_refused(use)
    second.end()
    third.end()
    use.begin("anna", 1)


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 50)), max_size=60))
def test_over_any_time_a_key_gets_no_more_than_its_share(steps: list[tuple[float, int]]) -> None:
    clock = Clock()
    use = KeyUse(known("tokens=60 requests=30"), clock)
    begin, taken, made = clock.now, 0, 0
    for pause, tokens in steps:
        clock.now += pause
        try:
            use.begin("anna", tokens).end()
        except RateLimitError:
            continue
        taken, made = taken + tokens, made + 1
    minutes = (clock.now - begin) / 60
    assert taken <= 60 * (1 + minutes) + 1e-6
    assert made <= 30 * (1 + minutes) + 1e-6


def write_keys(path: Path, *lines: str) -> None:
    path.write_text("\n".join(lines))
    path.chmod(0o600)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))  # changes the time on any file system


def test_a_key_file_is_read_again_when_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, path, told = Clock(), tmp_path / "keys", list[list[str]]()
    write_keys(path, "anna=key-of-anna")
    ring = KeyRing(ServerConfig(api_key_file=str(path), api_keys={"tim": "key-of-tim"}), clock)
    ring.observers.append(lambda keys: told.append(list(keys)))
    assert list(ring()) == ["tim", "anna"]

    write_keys(path, "anna=key-of-anna", "eva=key-of-eva")
    assert list(ring()) == ["tim", "anna"], "it looks once a second"
    clock.now += SECONDS_BETWEEN_LOOKS
    assert list(ring()) == ["tim", "anna", "eva"]

    for number in range(2):
        if number:
            path.unlink()
        else:
            write_keys(path, "eva=short")
        clock.now += SECONDS_BETWEEN_LOOKS
        caplog.clear()
        assert list(ring()) == ["tim", "anna", "eva"]
        assert "stay as they were" in caplog.text
        clock.now += SECONDS_BETWEEN_LOOKS
        caplog.clear()
        ring()
        assert not caplog.text, "it is said once"

    write_keys(path, "eva=key-of-eva")
    clock.now += SECONDS_BETWEEN_LOOKS
    assert list(ring()) == ["tim", "eva"]
    assert told == [["tim", "anna", "eva"], ["tim", "eva"]]


async def ask(running: Running, key: str) -> httpx.Response:
    body = {"prompt": "hello", "max_tokens": 2}
    headers = {"authorization": f"Bearer {key}"}
    return await running.http.post("/v1/completions", json=body, headers=headers)


async def test_limits_hold_over_http_until_the_file_says_else(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write_keys(path, "anna=key-of-anna requests=1", "tim=key-of-tim")
    async with serve(server={"api_key_file": str(path)}) as running:
        assert (await ask(running, "key-of-anna")).status_code == 200
        refused = await ask(running, "key-of-anna")
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert "may make 1 request a minute" in refused.json()["error"]["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert (await ask(running, "key-of-tim")).status_code == 200
        assert (await ask(running, "key-of-eva")).status_code == 401

        write_keys(path, "eva=key-of-eva", "tim=key-of-tim")

        await until(lambda: [*running.server.keys()] == ["eva", "tim"])
        assert (await ask(running, "key-of-eva")).status_code == 200
        assert (await ask(running, "key-of-anna")).status_code == 401


async def test_a_keys_priority_is_what_its_requests_have(serve: Serve) -> None:
    keys = {"anna": "key-of-anna priority=5", "tim": "key-of-tim priority=-5"}
    async with serve(server={"api_keys": keys}) as running:
        for name, asked, status in (
            ("anna", 5, 200), ("anna", 4, 400), ("tim", -5, 200), ("tim", -6, 400),
        ):  # fmt: skip
            body = {"prompt": "a", "max_tokens": 1, "priority": asked}
            headers = {"authorization": f"Bearer key-of-{name}"}
            answer = await running.http.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == status, answer.text
