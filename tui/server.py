"""A server's address and credentials, as the dashboard uses them."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass, field

import httpx

from appliance.errors import ConfigError

CONNECT_TIMEOUT = 5.0  # seconds


def server_url(text: str) -> httpx.URL:
    """Parse a server's address, with or without scheme, slash or `/v1`.

    Raises:
        ConfigError: it is no http address.
    """
    try:
        url = httpx.URL(text if "://" in text else f"http://{text}")
    except httpx.InvalidURL as error:
        raise ConfigError(f"--url {text!r} is no address: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"--url {text!r} is no address; write it like http://127.0.0.1:8080")
    path = url.path.rstrip("/").removesuffix("/v1")
    return url.copy_with(path=path or "/", query=None, fragment=None)


@dataclass(frozen=True, slots=True)
class Server:
    """One server.

    Attributes:
        url: its root, see `server_url`.
        headers: that go with every request; the key is among them.
        ca_file: certificates to trust over HTTPS; None means those that Python trusts.
    """

    url: httpx.URL
    headers: dict[str, str] = field(repr=False)  # no key in any traceback
    ca_file: str | None = None

    @classmethod
    def at(cls, url: str, api_key: str | None, ca_file: str | None = None) -> Server:
        """The server at an address.

        Raises:
            ConfigError: the address is none, or the key cannot be sent, or the file cannot be read.
        """
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("the API key may hold printable ASCII characters only")
        key = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        server = cls(server_url(url), {"Cache-Control": "no-store", **key}, ca_file)
        server.trusted()
        return server

    def path(self, path: str) -> httpx.URL:
        """Return the URL of a path on the server."""
        return self.url.copy_with(raw_path=(self.url.path.rstrip("/") + path).encode("ascii"))

    def client(self, read_timeout: float) -> httpx.AsyncClient:
        """Open a client for the server; close it after use."""
        return httpx.AsyncClient(
            headers=self.headers,
            timeout=httpx.Timeout(CONNECT_TIMEOUT, read=read_timeout),
            # A proxy from the environment cannot reach this machine's loopback.
            trust_env=not _is_loopback(self.url.host),
            verify=self.trusted(),
        )

    def trusted(self) -> ssl.SSLContext | bool:
        """Return the TLS context for this server.

        On this machine's loopback nobody stands between, so the certificate there need not be in
        the name of that address; it has to be one that is trusted all the same.
        """
        if self.ca_file is None:
            return True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a server's own is enough
        context.check_hostname = not _is_loopback(self.url.host)
        try:
            context.load_verify_locations(self.ca_file)
        except OSError as error:
            why = error.strerror if not isinstance(error, ssl.SSLError) else "no certificate in PEM"
            raise ConfigError(f"--ca-file {self.ca_file}: {why}") from None
        return context


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
