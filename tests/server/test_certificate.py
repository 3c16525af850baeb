"""HTTPS: certificates from files, the errors in them, and clients that trust them."""

from __future__ import annotations

import os
import shutil
import ssl
from pathlib import Path

import httpx
import pytest
from support.runs.waiting import LIMIT

from appliance.errors import ConfigError
from appliance.server.http.certificate import Certificate
from appliance.tui.server import Server
from tests.server.test_serve import server

FILES = Path(__file__).parent / "certificates"  # of llm.example, for a hundred years
GOOD, GOOD_KEY = str(FILES / "good.pem"), str(FILES / "good.key")


def serial(certificate: Certificate) -> str:
    """The serial number of the certificate that new connections get."""
    client = ssl.create_default_context(cafile=GOOD)
    client.load_verify_locations(str(FILES / "expired.pem"))
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = client.wrap_bio(down, up)
    other = certificate.context.wrap_bio(up, down, server_side=True)
    for _ in range(3):
        for end in (one, other):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    found = one.getpeercert(binary_form=True)
    assert found is not None
    return ssl.DER_cert_to_PEM_cert(found)


@pytest.mark.parametrize(
    ("file", "key", "message"),
    [
        ("missing.pem", None, "--tls-cert: .*missing.pem cannot be read: No such file"),
        ("good.pem", "missing.key", "--tls-key: .*missing.key cannot be read: No such file"),
        ("good.pem", None, "are no certificate and private key in PEM"),
        ("good.key", "good.key", "are no certificate and private key in PEM"),
        ("good.pem", "other.key", "--tls-key: the key in .*other.key is not that of .*good.pem"),
        ("good.pem", "locked.key", "--tls-key: the key in .*locked.key has a password; remove it"),
        ("expired.pem", "expired.key", "--tls-cert: .*expired.pem has expired; renew it"),
    ],
)
def test_what_cannot_be_used_is_said_in_a_line(file: str, key: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        Certificate(str(FILES / file), None if key is None else str(FILES / key))
    assert "\n" not in str(refused.value)


def test_files_that_change_are_read_again(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "cert.key"
    shutil.copy(GOOD, cert)
    shutil.copy(GOOD_KEY, key)
    certificate = Certificate(str(cert), str(key))
    first = serial(certificate)
    cert.write_text((FILES / "expired.pem").read_text())
    certificate.refresh()
    assert serial(certificate) == first, "an expired one does not take its place"
    cert.unlink()
    certificate.refresh()
    assert serial(certificate) == first
    both = tmp_path / "new.pem"
    both.write_text(Path(GOOD).read_text() + Path(GOOD_KEY).read_text())
    os.replace(both, cert)
    certificate.refresh()
    assert serial(certificate) == first
    assert Certificate(str(cert), None).context is not None, "both may be in one file"


async def test_a_server_speaks_https_and_the_dashboard_trusts_its_certificate(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APPLIANCE_TLS_CERT", GOOD)
    monkeypatch.setenv("APPLIANCE_TLS_KEY", GOOD_KEY)
    with server(tokenizer_folder) as running:
        running.wait_until_ready()
        assert running.url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=GOOD)
        trusting.check_hostname = False
        body = {"prompt": "hi", "stream": True}
        async with httpx.AsyncClient(base_url=running.url, timeout=LIMIT, verify=trusting) as http:
            assert (await http.get("/")).status_code == 200
            text = (await http.post("/v1/completions", json=body)).text
            assert text.endswith("data: [DONE]\n\n")
        async with Server.at(running.url, None, GOOD).client(LIMIT) as dashboard:
            assert (await dashboard.get(f"{running.url}/ready")).status_code == 200
        async with Server.at(running.url, None).client(LIMIT) as dashboard:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await dashboard.get(f"{running.url}/ready")
        running.process.terminate()
        assert running.process.wait(timeout=LIMIT) == 0


def test_a_server_with_a_wrong_certificate_does_not_start(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APPLIANCE_TLS_CERT", str(FILES / "expired.pem"))
    monkeypatch.setenv("APPLIANCE_TLS_KEY", str(FILES / "expired.key"))
    with server(tokenizer_folder) as running:
        assert running.process.wait(timeout=LIMIT) == ConfigError.exit_code
        assert running.process.stderr is not None
        assert "has expired; renew it" in running.process.stderr.read()


def test_a_ca_file_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--ca-file .*good.key: no certificate in PEM"):
        Server.at("https://127.0.0.1:1", None, GOOD_KEY)
    with pytest.raises(ConfigError, match="--ca-file /nowhere: No such file"):
        Server.at("https://127.0.0.1:1", None, "/nowhere")
