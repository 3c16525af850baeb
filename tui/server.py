"""A server's address and credentials."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass, field

import httpx

from appliance.errors import ConfigError

CONNECT_TIMEOUT = 5.0  # seconds


def server_url(text: str) -> httpx.URL:
    """Parse an address with or without scheme, slash or `/v1`, or raise ConfigError."""
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
    """Address and credentials of one server.

    Attributes:
        url: root of the server, see `server_url`.
        headers: sent with every request; they include the key.
        ca_file: certificates to trust over HTTPS; None for Python's defaults.
    """

    url: httpx.URL
    headers: dict[str, str] = field(repr=False)  # no key in any traceback
    ca_file: str | None = None

    @classmethod
    def at(cls, url: str, api_key: str | None, ca_file: str | None = None) -> Server:
        """Build a server from an address and a key.

        Raises:
            ConfigError: the address is invalid, the key is not printable ASCII, or the file is
                unreadable.
        """
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("the API key may hold printable ASCII characters only")
        key = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        server = cls(server_url(url), {"Cache-Control": "no-store", **key}, ca_file)
        server.trusted()
        return server

    def path(self, path: str) -> httpx.URL:
        return self.url.copy_with(raw_path=(self.url.path.rstrip("/") + path).encode("ascii"))

    def client(self, read_timeout: float) -> httpx.AsyncClient:
        """Open a client for the server; the caller closes it."""
        return httpx.AsyncClient(
            headers=self.headers,
            timeout=httpx.Timeout(CONNECT_TIMEOUT, read=read_timeout),
            # A proxy from the environment cannot reach this machine's loopback.
            trust_env=not _is_loopback(self.url.host),
            verify=self.trusted(),
        )

    def trusted(self) -> ssl.SSLContext | bool:
        """Return the TLS context, or True for Python's defaults.

        On loopback the certificate may be for another name, but must still be trusted. Over plain
        HTTP none is read, which would take longer than to connect.
        """
        if self.ca_file is None:
            return True if self.url.scheme == "https" else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trusts the server's own
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
