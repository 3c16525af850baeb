"""A TLS certificate from files, reloaded after changes."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl

from appliance.errors import ConfigError

SECONDS_BETWEEN_LOOKS = 10.0

logger = logging.getLogger(__name__)

_Stamp = tuple[tuple[int, int, int], ...]
_EXPIRED, _NOT_YET_VALID = 10, 9  # OpenSSL's X509_V_ERR_CERT_HAS_EXPIRED and ..._NOT_YET_VALID


class Certificate:
    """A certificate and its private key.

    Args:
        file: the certificate and its chain in PEM.
        key_file: its private key; None if `file` contains it.

    Attributes:
        context: for a server; new connections use the latest certificate.

    Raises:
        ConfigError: a file is missing or wrong, or the certificate has expired.
    """

    def __init__(self, file: str, key_file: str | None) -> None:
        self._file = file
        self._key_file = key_file or file
        self._stamp = self._read_stamp()
        self._check()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.set_alpn_protocols(["http/1.1"])
        self._load(self.context)

    async def follow(self) -> None:
        """Reload the files after each change, until cancelled."""
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
            self.refresh()

    def refresh(self) -> None:
        """Reload changed files; keep the old certificate if the new one is invalid."""
        try:
            stamp = self._read_stamp()
            if stamp == self._stamp:
                return
            self._check()
            self._load(self.context)
        except ConfigError as error:
            # Only one of the two files may be written yet: check again later.
            logger.warning("the TLS certificate stays as it was: %s", error)
        else:
            self._stamp = stamp
            logger.info("the TLS certificate %s was read again", self._file)

    def _read_stamp(self) -> _Stamp:
        found = []
        for name, flag in ((self._file, "--tls-cert"), (self._key_file, "--tls-key")):
            try:
                stat = os.stat(name)
            except OSError as error:
                raise ConfigError(f"{flag}: {name} cannot be read: {error.strerror}") from None
            found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
        return tuple(found)

    def _load(self, context: ssl.SSLContext) -> None:
        def no_password() -> str:
            raise ConfigError(f"--tls-key: the key in {self._key_file} has a password; remove it")

        try:
            context.load_cert_chain(self._file, self._key_file, no_password)
        except OSError as error:  # base of ssl's errors, too
            raise ConfigError(self._why(error)) from None

    def _why(self, error: OSError) -> str:
        if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
            return f"--tls-key: the key in {self._key_file} is not that of {self._file}"
        if not isinstance(error, ssl.SSLError):
            return f"--tls-cert, --tls-key: {error.strerror}: {error.filename or self._file}"
        return (
            f"--tls-cert, --tls-key: {self._file} and {self._key_file} are no certificate and"
            " private key in PEM"
        )

    def _check(self) -> None:
        """Run a handshake with a client that trusts only this certificate.

        Raises:
            ConfigError: the certificate cannot be loaded, or no client would accept it.
        """
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._load(server)
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        client.load_verify_locations(self._file)
        up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True)
        for _ in range(4):  # each side takes two turns
            for end in ends:
                try:
                    end.do_handshake()
                except ssl.SSLWantReadError:
                    continue
                except ssl.SSLCertVerificationError as error:
                    raise ConfigError(f"--tls-cert: {self._file} {_in_words(error)}") from None


def _in_words(error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code == _EXPIRED:
        return "has expired; renew it"
    if error.verify_code == _NOT_YET_VALID:
        return "is not valid yet; see whether the clock is right"
    return f"would be refused by clients: {error.verify_message}"
