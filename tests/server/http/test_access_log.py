"""The access log: a line for each request if enabled, without anything of its content."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
from support.runs.waiting import until

from appliance.server.http import access_log

if TYPE_CHECKING:
    from tests.server.conftest import Serve

KEYS = {"anna": "key-of-anna"}


@pytest.fixture(autouse=True)
def _level_as_before() -> None:
    logging.getLogger(access_log.__name__).setLevel(logging.NOTSET)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == access_log.__name__]


async def test_who_asked_for_what_and_how_it_ended(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    server = {"access_log": True, "api_keys": KEYS}
    async with serve(server=server, headers={"x-api-key": KEYS["anna"]}) as running:
        await running.complete("a secret wish", max_tokens=2)
        await running.http.get("/v1/models?wish=secret", headers={"x-request-id": "mine"})
        await running.http.get("/v1/models", headers={"x-api-key": "secret-key"})
        await running.http.get("/health")
        async with running.http.stream(
            "POST", "/v1/completions", json={"model": "echo", "prompt": "secret", "stream": True}
        ) as response:
            await response.aread()
        await until(lambda: len(lines(caplog)) == 5)
    found = lines(caplog)
    assert [line.split()[:5] for line in found] == [
        ["127.0.0.1", "anna", "POST", "/v1/completions", "200"],
        ["127.0.0.1", "anna", "GET", "/v1/models", "200"],
        ["127.0.0.1", "-", "GET", "/v1/models", "401"],
        ["127.0.0.1", "-", "GET", "/health", "200"],
        ["127.0.0.1", "anna", "POST", "/v1/completions", "200"],
    ]
    assert found[1].endswith("s mine")
    assert "secret" not in caplog.text
    record = next(one for one in caplog.records if one.name == access_log.__name__)
    fields = vars(record)["fields"]
    assert (fields["status"], fields["key"]) == (200, "anna")
    assert fields["seconds"] >= 0


async def test_without_the_setting_nothing_is_logged(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        async with serve() as running:
            await running.http.get("/v1/models")
    assert not lines(caplog)
