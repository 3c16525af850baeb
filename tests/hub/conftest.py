"""A local replacement of a model hub: the few endpoints that huggingface_hub uses."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from support.runs.forked_commands import ForkedCommands, forked_commands

IMPORTED = (
    "appliance.cli",
    "appliance.hub.headers",
    "appliance.hub.remote",
    "huggingface_hub.hf_api",
    "huggingface_hub.file_download",
    "huggingface_hub.utils",
    "typer.testing",
)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer(ThreadingHTTPServer):
    """Repositories, and a record of the requests.

    Attributes:
        repos: files by repository.
        refused: repositories that answer 401 without a token.
        cut_after: by file, the bytes after which each of the next answers breaks off.
        shortened: files whose answers lack the last byte.
        requests: method, path and Range header of each request.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.refused: set[str] = set()
        self.cut_after: dict[str, list[int]] = {}
        self.shortened: set[str] = set()
        self.requests: list[tuple[str, str, str | None]] = []

    @property
    def url(self) -> str:
        """The endpoint."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def downloaded(self) -> list[str]:
        """Files whose content was requested, once for each answer."""
        gets = [path for method, path, _ in self.requests if method == "GET"]
        return [path.split("/resolve/")[1].split("/", 1)[1] for path in gets if "/resolve/" in path]


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing on stderr."""

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append((self.command, self.path, self.headers.get("Range")))
        for repo, files in self.server.repos.items():
            if path.startswith((f"/api/models/{repo}", f"/{repo}/resolve/")):
                if repo in self.server.refused and "Authorization" not in self.headers:
                    return self._error(401, "GatedRepo", "Access is restricted")
                if path.startswith("/api/") and path.endswith("/revision/none"):
                    return self._error(404, "RevisionNotFound", "Revision not found")
                if path.startswith("/api/"):
                    return self._describe(repo, files, path)
                name = path.split("/", 5)[5]
                if name in files:
                    return self._send_file(name, files[name])
                return self._error(404, "EntryNotFound", "Entry not found")
        return self._error(404, "RepoNotFound", "Repository not found")

    def _describe(self, repo: str, files: dict[str, bytes], path: str) -> None:
        if "/tree/" in path:
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                for name, data in files.items()
            ]
            return self._json(entries)
        siblings = [
            {"rfilename": name, "size": len(data), "blobId": _etag(data)}
            for name, data in files.items()
        ]
        return self._json({"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings,
                           "private": False, "tags": [], "downloads": 0, "likes": 0})  # fmt: skip

    def _send_file(self, name: str, data: bytes) -> None:
        start = 0
        full_etag = _etag(data)
        if name in self.server.shortened and self.command == "GET":
            data = data[:-1]
        if wanted := self.headers.get("Range"):
            begin, _, last = wanted.removeprefix("bytes=").partition("-")
            start, data = int(begin), data[: int(last) + 1] if last else data
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.send_header("ETag", f'"{full_etag}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if self.command == "GET":
            cuts = self.server.cut_after.get(name, [])
            end = start + cuts.pop(0) if cuts else len(data)
            self.wfile.write(data[start:end])
            if end < len(data):
                self.wfile.flush()
                self.close_connection = True

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), "application/json")

    def _error(self, status: int, code: str, message: str) -> None:
        self._send(status, b"", "text/plain", {"X-Error-Code": code, "X-Error-Message": message})

    def _send(
        self, status: int, body: bytes, kind: str, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _etag(data: bytes) -> str:
    """Git's name of the content, which the hub uses for small files."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedCommands]:
    """Processes of their own: huggingface_hub reads its environment once, at import."""
    folder = tmp_path_factory.mktemp("commands")
    with forked_commands(folder, IMPORTED, again="huggingface_hub") as running:
        yield running
