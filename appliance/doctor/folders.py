"""Checks the folders of caches and models: write access, free space, leftovers."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from appliance.config import cache_dir, jobs_dir, kv_dir, packed_dir
from appliance.doctor.finding import GIB, MIB, Finding, Grade, Scope, show_gib
from appliance.files import bytes_on_disk, check_private
from appliance.hub import hub_cache
from appliance.progress.jobs import stale_jobs
from appliance.wording import counted

LEAST_FREE = 512 * MIB  # the default model and its compiled kernels
LITTLE_FREE = 5 * GIB  # a small model of the hub in 4 bits


def check_folders(scope: Scope) -> Iterator[Finding]:
    """Write a nameless file into each folder, and check its disk's free space."""
    for name, folder, setting in _folders(scope):
        yield _writable(name, folder, setting)
        existing = _existing(folder)
        free = shutil.disk_usage(existing).free
        wanted = scope.engine.kv_disk_size if setting == "kv_disk" else LITTLE_FREE
        grade = Grade.OK if free >= wanted else Grade.WARN if free >= LEAST_FREE else Grade.FAIL
        fix = "" if grade is Grade.OK else f"make room, or put it on another disk with {setting}"
        found = f"{show_gib(free)} free for {folder}"
        if grade is not Grade.OK:
            found += f"; it may want {show_gib(wanted)}"
        yield Finding(f"{name} disk", grade, found, fix)
    if scope.engine.kv_disk != "off" and (folder := _kv_folder(scope)).is_dir():
        yield _private(folder)


def check_leftovers(scope: Scope) -> Iterator[Finding]:
    """Find leftovers of interrupted tasks and downloads."""
    stale = stale_jobs(jobs_dir())
    if stale:
        names = shlex.join(str(path.with_suffix(".*")) for path in stale).replace("'", "")
        found = f"{counted(len(stale), 'progress file')} of tasks that ended without reporting it"
        yield Finding("tasks", Grade.WARN, found, f"harmless; to remove them: rm {names}")
    else:
        yield Finding("tasks", Grade.OK, "no progress file is left over")
    partial = [*hub_cache().glob("models--*/blobs/*.incomplete")]
    partial += (cache_dir() / "models").glob(".download-*")
    partial += (cache_dir() / "models").glob(".*.tmp")
    if partial:
        size = sum(bytes_on_disk(path) for path in partial)
        found = f"{counted(len(partial), 'download')} not finished, {show_gib(size)}: {partial[0]}"
        fix = "start the same model again; or, if nothing downloads now, remove them"
        yield Finding("downloads", Grade.WARN, found, fix)
    else:
        yield Finding("downloads", Grade.OK, "none is unfinished")


def _folders(scope: Scope) -> Iterator[tuple[str, Path, str]]:
    yield "cache", cache_dir(), "APPLIANCE_CACHE_DIR"
    if scope.engine.kv_disk != "off":
        yield "KV cache", _kv_folder(scope), "kv_disk"
    packed = scope.engine.packed_weights
    if packed != "off":
        folder = packed_dir() if packed == "auto" else Path(packed).expanduser()
        yield "packed weights", folder, "packed_weights"
    yield "hub cache", hub_cache(), "HF_HOME"


def _kv_folder(scope: Scope) -> Path:
    setting = scope.engine.kv_disk
    return kv_dir() if setting == "auto" else Path(setting).expanduser()


def _writable(name: str, folder: Path, setting: str) -> Finding:
    existing = _existing(folder)
    fix = f"give yourself the right to write there, or choose another folder with {setting}"
    if not existing.is_dir():
        fix = f"move {existing} away, or choose another folder with {setting}"
        return Finding(f"{name} folder", Grade.FAIL, f"{existing} is no folder", fix)
    try:
        with tempfile.TemporaryFile(dir=existing):  # it has no name, if the disk supports that
            pass
    except OSError as error:
        found = f"{existing} cannot be written to: {error.strerror}"
        return Finding(f"{name} folder", Grade.FAIL, found, fix)
    made = "" if existing == folder else ", which is made when it is needed"
    return Finding(f"{name} folder", Grade.OK, f"{folder}{made}")


def _private(folder: Path) -> Finding:
    try:
        check_private(folder)
    except OSError as error:
        fix = "follow this message: others could read cached prompts"
        return Finding("KV cache owner", Grade.FAIL, str(error.strerror), fix)
    return Finding("KV cache owner", Grade.OK, f"nobody else may change {folder}")


def _existing(folder: Path) -> Path:
    # Not Path.exists, which raises if a parent is closed to this user.
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))
