"""Names of GGUF files, and of the parts that one model may be split into.

llama.cpp's splitter names parts NAME-00001-of-00003.gguf, and so do its converter and the hub. A
leaf: looks at names, never into files.
"""

from __future__ import annotations

import re
from glob import escape
from pathlib import Path

SUFFIX = ".gguf"

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.I)
_MOST_PARTS = 65535  # the format counts them in 16 bits


def is_gguf(file: Path | str) -> bool:
    """Return True for the name of a GGUF file, in any capitals."""
    return str(file).lower().endswith(SUFFIX)


def is_projector(name: str) -> bool:
    """Return True for the usual names of files with the vision tower of a model."""
    return "mmproj" in Path(name).name.lower()


def is_draft_head(name: str) -> bool:
    """Return True for names as llama.cpp's converter gives them to a model's draft head."""
    return Path(name).name.startswith("mtp-")


def is_beside_a_model(name: str) -> bool:
    """Return True for usual names of projectors, draft heads and importance matrices."""
    is_matrix = Path(name).name.lower().startswith("imatrix")
    return is_matrix or is_projector(name) or is_draft_head(name)


def parts_of_name(name: str) -> tuple[str, ...]:
    """Return the names of all parts of the model that a file is of; itself if it is whole.

    A name may have folders before it.
    """
    found = _PART.fullmatch(name)
    if found is None or not 1 <= int(found["number"]) <= int(found["count"]) <= _MOST_PARTS:
        return (name,)
    count = int(found["count"])
    return tuple(
        f"{found['stem']}-{number:05}-of-{count:05}{found['suffix']}"
        for number in range(1, count + 1)
    )


def parts_of(path: Path) -> tuple[Path, ...]:
    """Return the files of the model that a file is of, in order; they need not exist."""
    return tuple(path.with_name(name) for name in parts_of_name(path.name))


def first_part(path: Path) -> Path:
    """Return the file that stands for its model."""
    return parts_of(path)[0]


def stem_of(path: Path) -> str:
    """Return a file's name without its ending and the number of its part."""
    found = _PART.fullmatch(path.name)
    return path.stem if found is None else found["stem"]


def first_parts(names: list[str]) -> list[str]:
    """Return the names of GGUF files, and of several parts the first that is there."""
    firsts: dict[str, str] = {}
    for name in names:
        if is_gguf(name):
            firsts.setdefault(parts_of_name(name)[0], name)
    return list(firsts.values())


def find_first_part(prefix: Path) -> Path | None:
    """Return the first part of the model whose parts a path without number and ending names."""
    named = prefix.parent.glob(f"{escape(prefix.name)}-00001-of-*")
    found = [one for one in named if is_gguf(one) and len(parts_of(one)) > 1]
    return found[0] if len(found) == 1 else None
