"""Finds the files that belong to a GGUF model: its projector (`mmproj`) and draft head (`mtp`).

A leaf: looks at names, and at the first bytes of files whose names say nothing.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from appliance.errors import ConfigError
from appliance.files import open_regular
from appliance.model_files.gguf_names import (
    first_parts,
    is_draft_head,
    is_gguf,
    is_projector,
    parts_of_name,
    stem_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_HEAD_BYTES = 1 << 16
# `general.architecture` = clip, as a header has it: lengths, the key, its type, the value.
_CLIP = b"\x14\0\0\0\0\0\0\0general.architecture\x08\0\0\0\x04\0\0\0\0\0\0\0clip"
_BITS = re.compile(r"(?:^|[-._ ])(?:i?q|tq|b?f|fp|mxfp|nvfp)(\d+)", re.I)
_WORD = re.compile(r"[-._ ]+")


def starts_as_projector(path: Path) -> bool:
    """Return True for a GGUF file whose header says that it is a projector's."""
    try:
        with open_regular(path) as content:
            return _CLIP in content.read(_HEAD_BYTES)
    except OSError:
        return False


def nearest_first(
    model: str, names: Iterable[str], is_wanted: Callable[[str], bool] = is_projector
) -> list[str]:
    """Order the files that may belong to a model, by how near their names are.

    Such a file is in the model's folder, or above it. The deepest come first, then those that share
    most words with the model's name, then those of the nearest bit width, as llama.cpp has it.

    Args:
        model: the model's name, perhaps with folders before it.
        names: of all files, likewise.
        is_wanted: tells their kind by a name.
    """
    folder = PurePosixPath(model).parent
    words, bits = _words(model), _bits(model)

    def place(name: str) -> tuple[int, int, int, str]:
        depth = len(PurePosixPath(name).parent.parts)
        return -depth, -len(words & _words(name)), abs(_bits(name) - bits), name

    above = [
        name
        for name in names
        if is_gguf(name) and is_wanted(name) and folder.is_relative_to(PurePosixPath(name).parent)
    ]
    return sorted(above, key=place)


def projectors_beside(model: Path) -> list[Path]:
    """Return the projector files that may belong to a GGUF model, nearest first.

    Without one in the model's folder, those above it in a hub's snapshot count.
    """
    folder = model.parent
    try:
        names = sorted(one.name for one in folder.iterdir())
    except OSError:  # a file may be readable where its folder is not
        return []
    if found := nearest_first(model.name, names):
        return [folder / name for name in found]
    own = set(parts_of_name(model.name))
    others = [name for name in first_parts(names) if name not in own]
    if unnamed := [name for name in others if starts_as_projector(folder / name)]:
        return [folder / name for name in unnamed]
    return _above(model, is_projector)


def draft_heads_beside(model: Path) -> list[Path]:
    """Return the files with draft heads that may belong to a GGUF model, nearest first.

    Of several parts the first counts. Those above its folder count as those of projectors do.
    """
    try:
        names = first_parts(sorted(one.name for one in model.parent.iterdir()))
    except OSError:
        return []
    own = set(parts_of_name(model.name))
    found = [name for name in nearest_first(model.name, names, is_draft_head) if name not in own]
    return [model.parent / name for name in found] or _above(model, is_draft_head)


def _above(model: Path, is_wanted: Callable[[str], bool]) -> list[Path]:
    """Return the files of a kind in a hub's snapshot that may belong to one of its models."""
    root = next((one for one in model.parents if one.parent.name == "snapshots"), None)
    if root is None:
        return []
    inside = first_parts(sorted(str(one.relative_to(root)) for one in root.rglob("*.gguf")))
    own = str(model.relative_to(root))
    return [root / name for name in nearest_first(own, inside, is_wanted) if name != own]


def find_projector(model: Path, asked: str = "") -> Path | None:
    """Find a model's projector file; None if it is a folder, or has none.

    Args:
        asked: the setting `mmproj`.

    Raises:
        ConfigError: the file that is asked for is not there, or the model is a folder.
    """
    if not asked:
        return next(iter(projectors_beside(model)), None) if model.is_file() else None
    if model.is_dir():
        raise ConfigError(
            f"--mmproj {asked}: {model.name} is a folder, which has its own vision tower if any;"
            " leave it out"
        )
    path = Path(asked).expanduser()
    if not path.is_file():
        raise ConfigError(f"--mmproj {asked}: there is no such file; give a projector's .gguf file")
    return path


def _words(name: str) -> set[str]:
    return set(_WORD.split(stem_of(Path(name)).lower())) - {"mmproj", "mtp"}


def _bits(name: str) -> int:
    """Return the bits that a name tells, 0 if it tells none."""
    found = _BITS.findall(stem_of(Path(name)))
    return int(found[-1]) if found else 0
