"""Protects the server against other web pages, by Host, Origin and site.

A browser on this machine reaches the server as its owner does. So the server refuses a foreign Host
(DNS rebinding) and requests from pages of another origin.
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING

from appliance.server.http.errors import ForbiddenError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from appliance.config import ServerConfig

_HOST = re.compile(r"(?P<name>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
_LOOPBACK_NAMES = {"localhost", "127.0.0.1", "[::1]"}
_OWN_SITES = {"same-origin", "none"}  # none: typed, or from a bookmark
_ANY = "*"


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Origins:
    """The host names of a server and the origins that it accepts.

    Args:
        config: the server's address, allowed hosts and allowed origins.
    """

    def __init__(self, config: ServerConfig) -> None:
        hosts, self._allowed = _words(config.allowed_hosts), _words(config.allowed_origins)
        own = config.host.lower()
        # A server open to other machines has many names, and a key that foreign pages lack.
        any_host = _ANY in hosts or not (hosts or is_loopback(own))
        own_names = {*_LOOPBACK_NAMES, f"[{own}]" if ":" in own else own}
        self._hosts = None if any_host else own_names | hosts

    def check(self, host: str, origins: Iterable[str]) -> str | None:
        """Check host name and origin.

        Returns:
            The request's foreign origin, if it is an allowed one.

        Raises:
            ForbiddenError: one of them is not allowed.
        """
        host = host.lower()
        match = _HOST.fullmatch(host)
        if self._hosts is not None and (match is None or match["name"] not in self._hosts):
            raise ForbiddenError(
                f"this server answers to {', '.join(sorted(self._hosts))} only; name others in "
                "allowed_hosts, such as that of a reverse proxy",
                code="host_not_allowed",
            )
        foreign = None
        for origin in origins:
            if origin.lower() in {f"http://{host}", f"https://{host}"}:
                continue
            if not self._allowed & {_ANY, origin.lower()}:
                raise ForbiddenError(
                    "requests from web pages of other origins are not accepted; name in "
                    "allowed_origins those that may call",
                    code="origin_not_allowed",
                )
            foreign = origin
        return foreign


def check_site(sites: Iterable[str]) -> None:
    """Refuse requests that a page of another site triggers, such as images and scripts.

    Such a request has no Origin, and its page cannot read the answer, but it still takes resources.

    Args:
        sites: all Sec-Fetch-Site headers; only browsers send them.

    Raises:
        ForbiddenError: the request comes from another site.
    """
    if not _OWN_SITES.issuperset(sites):
        raise ForbiddenError(
            "requests that web pages of other sites make are not accepted", code="site_not_allowed"
        )


def _words(text: str) -> set[str]:
    return {word.strip().lower() for word in text.split(",") if word.strip()}
