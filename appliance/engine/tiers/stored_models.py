"""Lists and removes the models stored in a folder, and walks their files. Imports no torch."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from appliance.engine.blocks.block_hashes import is_state
from appliance.files import read_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

ABOUT = "about.json"
SUFFIX = ".kv"  # of a block's file
STALE_SECONDS = 3600  # age of an abandoned unfinished file
_FOLDER = re.compile(r"[0-9a-f]{32}")
NAME = re.compile(r"([0-9a-f]{32}(?:73)?)" + re.escape(SUFFIX))  # with the mark of `state_key`
_BATCH = 64  # files per look, before other threads get their turn


@dataclass(frozen=True, slots=True)
class StoredModel:
    """One model's folder: its description and the size of its files."""

    fingerprint: str
    about: Mapping[str, object]
    num_blocks: int
    num_states: int  # checkpoints of recurrent layers
    num_bytes: int
    used: float  # Unix seconds of the last use, 0 if empty


class Removed(NamedTuple):
    """Counts of what `remove_models` removed."""

    blocks: int
    states: int
    num_bytes: int


def stored_models(root: Path) -> list[StoredModel]:
    """List the models in a folder, most recently used first; empty without a folder."""
    found = []
    for folder in _folders(root):
        files = list(_files_of(folder))
        try:
            about = json.loads(read_text(folder / ABOUT))
        except (OSError, ValueError):
            about = {}
        found.append(
            StoredModel(
                fingerprint=folder.name,
                about=about if isinstance(about, dict) else {},
                num_blocks=sum(not _is_state_file(path) for _, _, path in files),
                num_states=sum(_is_state_file(path) for _, _, path in files),
                num_bytes=sum(size for _, size, _ in files),
                used=max((stamp for stamp, _, _ in files), default=0) / 1e9,
            )
        )
    return sorted(found, key=lambda model: -model.used)


def remove_models(
    root: Path, fingerprints: Iterable[str] | None = None, *, older_than: float | None = None
) -> Removed:
    """Remove blocks and state checkpoints; a running server recomputes what it misses.

    Args:
        root: folder of all models.
        older_than: Unix seconds; keep files used since then.

    Raises:
        OSError: removing a file failed.
    """
    wanted = None if fingerprints is None else set(fingerprints)
    blocks = states = num_bytes = 0
    for folder in _folders(root):
        if wanted is not None and folder.name not in wanted:
            continue
        kept = 0
        for stamp, size, path in _files_of(folder):
            if older_than is not None and stamp / 1e9 >= older_than:
                kept += 1
                continue
            path.unlink(missing_ok=True)
            num_bytes += size
            if _is_state_file(path):
                states += 1
            else:
                blocks += 1
        if older_than is None or not kept:
            shutil.rmtree(folder, ignore_errors=True)
    return Removed(blocks, states, num_bytes)


def _is_state_file(path: Path) -> bool:
    return is_state(bytes.fromhex(path.name.removesuffix(SUFFIX)))


def _folders(root: Path) -> Iterator[Path]:
    if root.is_dir():
        for entry in sorted(os.listdir(root)):
            if _FOLDER.fullmatch(entry) and not (root / entry).is_symlink():
                yield root / entry


def all_files(root: Path) -> Iterator[tuple[int, int, Path]]:
    """Yield time of use in nanoseconds, size and path of each block of all models."""
    for folder in _folders(root):
        yield from _files_of(folder)


def _files_of(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """Yield time of use in nanoseconds, size and path of each block; remove unfinished files."""
    try:
        entries = os.scandir(folder)
    except OSError:
        return
    with entries:
        for count, entry in enumerate(entries):
            try:
                if NAME.fullmatch(entry.name):
                    stat = entry.stat(follow_symlinks=False)
                    yield stat.st_mtime_ns, stat.st_size, Path(entry.path)
                elif entry.name.endswith(".tmp"):
                    stat = entry.stat(follow_symlinks=False)
                    if stat.st_mtime < time.time() - STALE_SECONDS:
                        unlink(Path(entry.path))
            except FileNotFoundError:
                continue  # another process was faster
            if count % _BATCH == 0:
                time.sleep(0)


def unlink(path: Path) -> bool:
    """Remove a file; return False if that fails."""
    try:
        path.unlink()
    except OSError:
        return False
    return True
