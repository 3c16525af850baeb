"""GET /: the status page with a chat, served from files without a build step.

Public: it contains no data, and fetches it with the key that the user types.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request, Response

from appliance.docs import NAMES, read
from appliance.server.http.openapi import describes

FOLDER = Path(__file__).parent / "static"
# File and media type by path.
FILES: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    "/docs": ("docs.html", "text/html; charset=utf-8"),
    "/markdown-it.txt": ("markdown-it.txt", "text/plain; charset=utf-8"),  # its licences
    **{
        f"/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8")
        for name in (
            "page", "api", "blocks", "chat", "docs", "frames", "markdown", "markdown-it",
            "pictures", "status",
        )
    },
}  # fmt: skip
# The pages of /docs, also public: Markdown for each topic, and their names.
DOCUMENTS: Final = ("/docs/topics.txt", *(f"/docs/{name}.md" for name in NAMES))
# What needs no key.
OPEN_PATHS: Final = frozenset({"/health", "/ready", *FILES, *DOCUMENTS})
HEADERS: Final = {
    # Scripts, styles and pictures come only from these files, and pictures from a person's own.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        # Our scripts cannot turn text into markup.
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # revalidate, mostly with 304
}


def web_page_router() -> APIRouter:
    router = APIRouter()
    for path, (name, media_type) in FILES.items():
        _add(router, path, (FOLDER / name).read_bytes(), media_type)
    topics, *pages = DOCUMENTS
    _add(router, topics, "\n".join(NAMES).encode(), "text/plain; charset=utf-8")
    for path, name in zip(pages, NAMES, strict=True):
        _add(router, path, read(name).text.encode(), "text/markdown; charset=utf-8")

    return router


def _for_programs() -> Response:
    """Return the text that Ollama's clients expect at the root."""
    return Response("Ollama is running", media_type="text/plain", headers={"vary": "accept"})


def _add(router: APIRouter, path: str, content: bytes, media_type: str) -> None:
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {**HEADERS, "etag": tag}
    # The root also answers programs; other files are not part of an API.
    is_root = path == "/"
    documented = describes(None, None, media_types=("text/html", "text/plain"))
    if is_root:
        headers["vary"] = "accept"

    @router.get(path, include_in_schema=is_root, **documented)
    async def send(request: Request) -> Response:
        """Return a file of the status page."""
        if is_root and "text/html" not in request.headers.get("accept", ""):
            return _for_programs()
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)
