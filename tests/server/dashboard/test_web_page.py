from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

import pytest

from appliance.server.dashboard.web_page import FILES, FOLDER

if TYPE_CHECKING:
    from tests.server.conftest import Serve


BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}  # the others get no page


async def test_the_page_is_open_to_all_and_everything_else_wants_the_key(serve: Serve) -> None:
    async with serve(server={"api_key": "secret-key"}) as running:
        for path, (name, media_type) in FILES.items():
            response = await running.http.get(path, headers=BROWSER)
            assert response.status_code == 200
            assert response.headers["content-type"] == media_type
            assert response.content == (FOLDER / name).read_bytes()
        for path in ("/metrics", "/v1/models", "/admin/v1/events", "/index.html", "/openapi.json"):
            assert (await running.http.get(path)).status_code == 401


async def test_nothing_but_its_own_files_may_run_on_the_page(serve: Serve) -> None:
    async with serve() as running:
        for path in FILES:
            response = await running.http.get(path, headers=BROWSER)
            policy = dict(
                part.strip().split(" ", 1)
                for part in response.headers["content-security-policy"].split(";")
            )
            assert policy["default-src"] == "'none'"
            assert policy["script-src"] == policy["style-src"] == "'self'"
            assert policy["connect-src"] == "'self'"
            assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
            assert policy["require-trusted-types-for"] == "'script'"
            assert policy["trusted-types"] == "'none'"
            assert "unsafe" not in response.headers["content-security-policy"]
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["referrer-policy"] == "no-referrer"


async def test_a_browser_that_has_the_page_is_not_sent_it_again(serve: Serve) -> None:
    async with serve() as running:
        tag = (await running.http.get("/", headers=BROWSER)).headers["etag"]
        again = await running.http.get("/", headers={**BROWSER, "if-none-match": tag})
        assert (again.status_code, again.content) == (304, b"")


VENDORED = {"markdown-it.js", "markdown-it.txt"}
OWN = sorted({name for name, _ in FILES.values()} - VENDORED)


def test_what_is_not_ours_is_as_it_was_published_and_its_licences_are_there() -> None:
    code, about = (FOLDER / "markdown-it.js").read_bytes(), (FOLDER / "markdown-it.txt").read_text()
    assert hashlib.sha256(code).hexdigest() in about
    assert code.startswith(b"/*! markdown-it 15.0.3 ")
    for name in (
        "markdown-it 15.0.3",
        "linkify-it",
        "mdurl",
        "uc.micro",
        "punycode.js",
        "entities",
    ):
        assert name in about
    assert about.count("Permission is hereby granted") >= 5
    assert about.count("Redistribution and use") == 1
    for word in (b"innerHTML", b"outerHTML", b"document.", b"eval(", b"Function(", b"import("):
        assert word not in code, "it only takes text apart"


@pytest.mark.parametrize("name", OWN)
def test_no_file_refers_to_another_host_or_to_a_file_that_is_not_served(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert "@import" not in text
    known = {path.lstrip("/") for path in FILES} | {"metrics", "openapi.json", "v1/models"}
    if name == "index.html":
        references = re.findall(r'(?:src|href)="([^"]*)"', text)
        assert len(references) >= 7
        assert set(references) <= known
        assert not re.search(r"\son\w+=|\sstyle=|<style|<script>", text), "the policy forbids it"
    elif name.endswith(".js"):
        imported = re.findall(r'^import .* from "([^"]+)"', text, re.M)
        assert all(path.startswith("./") for path in imported)
        imported = [path.removeprefix("./") for path in imported]
        assert set(imported) <= known
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in text, "text of a model must never become markup"


def test_every_file_of_the_folder_is_served() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {name for name, _ in FILES.values()}
