"""Pictures from addresses: only of named hosts, and never of this machine's network by a name."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from appliance.errors import ImageFetchError, ImageTooLargeError
from appliance.server.http import image_urls
from appliance.server.http.image_urls import ImageUrls, is_public

DATA = bytes(range(256)) * 40


class Site(BaseHTTPRequestHandler):
    """A picture, redirects, an endless body, and a page that never answers."""

    def do_GET(self) -> None:
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("location", self.path.removeprefix("/to/"))
            self.end_headers()
        elif self.path == "/cat.png":
            self.send_response(200)
            self.send_header("content-type", "text/html")  # labels are not relied on
            self.end_headers()
            self.wfile.write(DATA)
        elif self.path == "/never":
            threading.Event().wait(5)
        else:
            self.send_error(404)

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


async def test_a_named_address_is_fetched_and_redirects_are_followed(site: str) -> None:
    urls = ImageUrls(" 127.0.0.1 , example.org")
    assert await urls.fetch(f"http://{site}/cat.png", 1 << 20) == DATA
    assert await urls.fetch(f"http://{site}/to//cat.png", 1 << 20) == DATA
    assert await urls.fetch(f"http://{site}/to/http://{site}/cat.png", 1 << 20) == DATA


@pytest.mark.parametrize("hosts", ["*", "localhost", "127.0.0.1"])
async def test_a_name_of_a_private_address_is_refused(site: str, hosts: str) -> None:
    """DNS rebinding: a name may mean this machine today."""
    url = f"http://{site.replace('127.0.0.1', 'localhost')}/cat.png"
    with pytest.raises(ImageFetchError, match=r"is not public|no pictures are fetched"):
        await ImageUrls(hosts).fetch(url, 1 << 20)


@pytest.mark.parametrize("host", ["2130706433", "0x7f.1", "127.1", "[::ffff:127.0.0.1]", "0"])
async def test_other_spellings_of_this_machine_are_refused(site: str, host: str) -> None:
    url = f"http://{host}:{site.partition(':')[2]}/cat.png"
    with pytest.raises(ImageFetchError):
        await ImageUrls("*").fetch(url, 1 << 20)


async def test_a_redirect_may_not_leave_what_is_named(site: str) -> None:
    port = site.partition(":")[2]
    for there in (
        f"http://localhost:{port}/cat.png", "file:///etc/passwd", "http://example.org/",
        "http://127.0.0.1:99999/", "http://[", f"http://{'a' * 70}.com/",
    ):  # fmt: skip
        with pytest.raises(ImageFetchError):
            await ImageUrls("127.0.0.1").fetch(f"http://{site}/to/{there}", 1 << 20)
    loop = f"http://{site}/to/" + "/to/" * 9 + "x"
    with pytest.raises(ImageFetchError, match="more than 3 redirects"):
        await ImageUrls("127.0.0.1").fetch(loop, 1 << 20)


async def test_what_is_too_large_missing_or_slow_ends(
    site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = ImageUrls("127.0.0.1")
    with pytest.raises(ImageTooLargeError):
        await urls.fetch(f"http://{site}/cat.png", len(DATA) - 1)
    with pytest.raises(ImageFetchError, match="answers 404"):
        await urls.fetch(f"http://{site}/other", 1 << 20)
    with pytest.raises(ImageFetchError, match="cannot be fetched"):
        await urls.fetch("http://127.0.0.1:9/cat.png", 1 << 20)
    monkeypatch.setattr(image_urls, "SECONDS", 0.2)
    with pytest.raises(ImageFetchError, match=r"no whole answer after 0.2 s"):
        await urls.fetch(f"http://{site}/never", 1 << 20)


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd", "http://", "http://a:b@example.org/", "ftp://example.org/", "x",
        "http://a..b/", "http://.a/", f"http://{'a' * 64}.com/", "http://x:99999/", "http://[::1/",
        "http://\ud800.org/",
    ],
)  # fmt: skip
async def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(ImageFetchError):
        await ImageUrls("*").fetch(url, 1 << 20)


async def test_names_below_a_name_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def resolve(self: object, host: str, *_: object, **__: object) -> list[Any]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 80))]

    monkeypatch.setattr(asyncio.get_running_loop().__class__, "getaddrinfo", resolve)
    urls = ImageUrls("*.Example.org")
    for host in ("a.example.org", "A.B.EXAMPLE.ORG"):
        with pytest.raises(ImageFetchError, match="is not public"):
            await urls.fetch(f"http://{host}/x", 1)
    for host in ("example.org", "badexample.org", "example.org.evil.net", "a.example.org."):
        with pytest.raises(ImageFetchError, match="no pictures are fetched"):
            await urls.fetch(f"http://{host}/x", 1)
    assert asked == ["a.example.org", "a.b.example.org"]


# IANA's registries of special-purpose addresses, and forms that hold an IPv4 address.
@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "0.0.0.0", "224.0.0.1", "255.255.255.255", "198.18.0.1", "192.0.2.1", "::", "::1",
        "fe80::1%eth0", "fc00::1", "ff02::1", "2001:db8::1", "::ffff:10.0.0.1",
        "64:ff9b::a00:1", "2002:a00:1::", "fec0::1",
    ],
)  # fmt: skip
def test_special_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "64:ff9b::808:808"])
def test_other_addresses_are_public(address: str) -> None:
    assert is_public(address)
