"""Checks model files against published hashes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from appliance.files import open_regular
from appliance.hub.growth import Progress, ignore_progress
from appliance.hub.packaged import PACKAGED
from appliance.model_files.files_beside import draft_heads_beside, projectors_beside
from appliance.model_files.gguf_names import parts_of

SHOWN_FROM = 1 << 30  # bytes; hashing fewer is too fast to report
_CHUNK = 1 << 22
_SHA256, _GIT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")


def known_hashes(model: Path) -> dict[Path, str]:
    """Return the published hashes of a model's files, its projector's and its draft head's."""
    if model.is_file():
        heads = (part for head in draft_heads_beside(model)[:1] for part in parts_of(head))
        return known_hashes_of((*parts_of(model), *projectors_beside(model)[:1], *heads))
    return known_hashes_of(sorted(one for one in model.iterdir() if one.is_file()))


def known_hashes_of(files: Iterable[Path]) -> dict[Path, str]:
    """Return the published hashes of those files that have one, by file."""
    packaged = {model.filename: model.sha256 for model in PACKAGED.values()}
    found = {}
    for file in files:
        blob = file.resolve()
        if file.name in packaged:
            found[file] = packaged[file.name]
        elif blob.parent.name == "blobs" and (_SHA256 if len(blob.name) == 64 else _GIT).fullmatch(
            blob.name
        ):
            found[file] = blob.name
    return found


def find_damaged(expected: Mapping[Path, str], progress: Progress = ignore_progress) -> list[Path]:
    """Hash files and return those that do not match.

    Args:
        expected: hash by file, from `known_hashes`.
        progress: called with bytes, if there are many.
    """
    total, done, damaged = sum(file.stat().st_size for file in expected), 0, []
    for file, wanted in expected.items():
        digest = _hasher(file, wanted)
        with open_regular(file) as content:
            while chunk := content.read(_CHUNK):
                digest.update(chunk)
                done += len(chunk)
                if total >= SHOWN_FROM:
                    progress("hash the model", done, total)
        if digest.hexdigest() != wanted:
            damaged.append(file)
    return damaged


def _hasher(file: Path, wanted: str) -> hashlib._Hash:
    if _SHA256.fullmatch(wanted):
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.stat().st_size, usedforsecurity=False)
