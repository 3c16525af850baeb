"""GET /: the status page with a chat, as files that are what the browser gets.

Open to all, since it holds nothing: what it shows it asks for with the key that a person types.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request, Response

from appliance.docs import NAMES, read
from appliance.server.openapi import describes

FOLDER = Path(__file__).parent / "static"
# Path to file and media type.
FILES: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    "/docs": ("docs.html", "text/html; charset=utf-8"),
    "/markdown-it.txt": ("markdown-it.txt", "text/plain; charset=utf-8"),  # its licences
    **{
        f"/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8")
        for name in (
            *("page", "api", "blocks", "chat", "docs", "frames", "markdown", "markdown-it"),
            "status",
        )
    },
}
# What /docs shows, open to all as well: a page of Markdown for each topic, and their names.
DOCUMENTS: Final = ("/docs/topics.txt", *(f"/docs/{name}.md" for name in NAMES))
HEADERS: Final = {
    # No markup can bring in a script, a style or a picture from anywhere but these files.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        # Nor can a script of ours turn text into markup, by mistake or talked into it.
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # ask again, and mostly hear that nothing is new
}


def page_router() -> APIRouter:
    """The routes."""
    router = APIRouter()
    for path, (name, media_type) in FILES.items():
        _add(router, path, (FOLDER / name).read_bytes(), media_type)
    topics, *pages = DOCUMENTS
    _add(router, topics, "\n".join(NAMES).encode(), "text/plain; charset=utf-8")
    for path, name in zip(pages, NAMES, strict=True):
        _add(router, path, read(name).text.encode(), "text/markdown; charset=utf-8")

    @router.head("/", include_in_schema=False)
    async def look() -> Response:
        """Clients of Ollama look in this way whether it is there."""
        return _for_programs()

    return router


def _for_programs() -> Response:
    """What clients of Ollama expect to read at its root."""
    return Response("Ollama is running", media_type="text/plain", headers={"vary": "accept"})


def _add(router: APIRouter, path: str, content: bytes, media_type: str) -> None:
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {**HEADERS, "etag": tag}
    if path == "/":
        headers["vary"] = "accept"

    @router.get(path, **describes(None, None, media_type=media_type.partition(";")[0]))
    async def send(request: Request) -> Response:
        """A file of the status page."""
        if path == "/" and "text/html" not in request.headers.get("accept", ""):
            return _for_programs()
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)
