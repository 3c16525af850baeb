"""A FIFO, socket or device in place of a file is refused by name at once, or skipped in a cache."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.echo.byte_tokenizer import save_byte_tokenizer

from appliance.engine.tiers.stored_models import stored_models
from appliance.errors import ApplianceError
from appliance.files import open_regular, read_json
from appliance.gguf.header import read_header, starts_as_gguf
from appliance.model.adapters.peft_folder import read_folder
from appliance.model_files.checkpoint import SafetensorsFolder
from appliance.progress.jobs import read_jobs
from appliance.tokenizer import Tokenizer

NO_MODEL: Any = None  # not read before the files
pytestmark = pytest.mark.timeout(60)  # only reached if opening a FIFO waits for a writer


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # an address has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(before)


def make_endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


Make = Callable[[Path], None]
KINDS = pytest.mark.parametrize(
    ("make", "kind"),
    [(make_fifo, "a FIFO"), (make_socket, "a socket"), (make_endless, "a device")],
)


@KINDS
def test_it_is_named(tmp_path: Path, make: Make, kind: str) -> None:
    path = tmp_path / "one.json"
    make(path)
    with pytest.raises(OSError, match=f"it is {kind}, not a regular file.*one.json"):
        open_regular(path)
    with pytest.raises(ApplianceError, match=f"one.json: it is {kind}, not a regular file"):
        read_json(path)


def test_links_and_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"content")
    (tmp_path / "link").symlink_to("real")
    for name in ("real", "link"):
        with open_regular(tmp_path / name) as file:
            assert file.read() == b"content"
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)


@KINDS
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", SafetensorsFolder),
        ("model.safetensors", SafetensorsFolder),
        ("model.gguf", lambda folder: read_header(folder / "model.gguf")),
        ("tokenizer.json", Tokenizer.from_path),
        ("adapter_config.json", lambda folder: read_folder(folder, NO_MODEL, {})),
    ],
)
def test_a_model_folder_with_one_is_refused(
    tmp_path: Path, make: Make, kind: str, name: str, read: Callable[[Path], object]
) -> None:
    save_byte_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    with pytest.raises(ApplianceError, match=name):
        read(tmp_path)


@KINDS
def test_caches_skip_one(tmp_path: Path, make: Make, kind: str) -> None:
    folder = tmp_path / "kv" / ("0" * 64)
    folder.mkdir(parents=True)
    make(folder / "about.json")
    stored_models(tmp_path / "kv")
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    make(jobs / "1-a.json")
    make(jobs / "1-a.lock")
    assert read_jobs(jobs) == {}
    assert starts_as_gguf(jobs / "1-a.json") is False
