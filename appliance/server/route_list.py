"""Collects the routes of one API, each with what /openapi.json says of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from starlette.routing import Route

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

Handler = Callable[["Request"], Awaitable["Response"]]


class DescribedRoute(Route):
    """A route of one method.

    Attributes:
        described: its operation, see `openapi.describes`; None keeps it out of the document.
    """

    def __init__(
        self, path: str, handler: Handler, method: str, described: dict[str, Any] | None
    ) -> None:
        super().__init__(path, handler, methods=[method])
        self.methods = {method}  # without the HEAD that comes with a GET
        self.method = method
        self.described = described


class RouteList:
    """Decorates handlers; `routes` has them in order."""

    def __init__(self) -> None:
        self.routes: list[DescribedRoute] = []

    def get(self, path: str, described: dict[str, Any] | None) -> Callable[[Handler], Handler]:
        return self._add("GET", path, described)

    def post(self, path: str, described: dict[str, Any] | None) -> Callable[[Handler], Handler]:
        return self._add("POST", path, described)

    def delete(self, path: str, described: dict[str, Any] | None) -> Callable[[Handler], Handler]:
        return self._add("DELETE", path, described)

    def head(self, path: str, described: dict[str, Any] | None) -> Callable[[Handler], Handler]:
        return self._add("HEAD", path, described)

    def _add(
        self, method: str, path: str, described: dict[str, Any] | None
    ) -> Callable[[Handler], Handler]:
        def add(handler: Handler) -> Handler:
            self.routes.append(DescribedRoute(path, handler, method, described))
            return handler

        return add
