"""The downloaded models on this machine: packaged ones, and those in the hub's cache.

Other programs share the hub's cache, so its state is read from huggingface_hub's folders:
`models--ORG--NAME` with `blobs`, `snapshots/COMMIT` of links to them, and `refs` that name commits.
A model is removed link by link, and a blob with its last link.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from appliance.errors import ModelError
from appliance.files import read_text
from appliance.hub.packaged import PACKAGED, packaged_name
from appliance.hub.remote import HubName, folder_name, hub_cache
from appliance.model_files.files_beside import nearest_first
from appliance.model_files.gguf_names import (
    first_parts,
    is_draft_head,
    is_gguf,
    is_projector,
    parts_of_name,
)

SAFETENSORS, GGUF = "safetensors", "GGUF"


@dataclass(frozen=True, slots=True)
class KeptModel:
    """A downloaded model.

    Attributes:
        name: as `serve` takes it.
        kind: safetensors or GGUF.
        files: its files, the projector and draft head of a GGUF model among them; in the hub's
            cache, links into `blobs`.
        used: Unix seconds of the latest read or change on record.
        complete: False for a packaged model of the wrong size, or a part that is missing.
    """

    name: str
    kind: str
    files: tuple[Path, ...]
    used: float
    complete: bool = True

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Incomplete files of a repository, from interrupted downloads."""

    repo: str
    files: tuple[Path, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)


def kept_models(cache_dir: Path) -> list[KeptModel]:
    """List the models, most recently used first.

    Args:
        cache_dir: of the appliance; packaged models are in its `models`.
    """
    return sorted([*_packaged(cache_dir), *_of_hub()], key=lambda model: -model.used)


def unfinished_downloads() -> list[Unfinished]:
    """List the repositories in the hub's cache with incomplete files."""
    found = []
    for folder in _repositories():
        files = tuple(sorted(folder.glob("blobs/*.incomplete")))
        if files:
            found.append(Unfinished(_repo_of(folder), files))
    return found


def find_kept(name: str, cache_dir: Path) -> KeptModel:
    """Find a model by an unambiguous part of its name; raise ModelError for none or several."""
    models = kept_models(cache_dir)
    own = packaged_name(name) if name else None
    exact = [model for model in models if model.name in (name, own)]
    wanted = HubName.parse(name)
    near = [model for model in models if wanted is not None and _matches(wanted, model.name)]
    found = exact or near
    if len(found) == 1:
        return found[0]
    names = ", ".join(model.name for model in (found or models)[:8])
    if found:
        raise ModelError(f"{name!r} is several models; name one of {names}")
    there = f"here are {names}" if names else "none has been downloaded"
    raise ModelError(f"{name!r} is not among the downloaded models; {there}")


def remove_kept(model: KeptModel) -> int:
    """Remove a model; return the bytes freed. A running server keeps what it loaded."""
    if model.name in PACKAGED:
        size = model.num_bytes
        for file in model.files:
            file.unlink()
        return size
    snapshot = _snapshot_of(model)
    folder = snapshot.parents[1]
    before = _size_of(folder)
    others = [one for one in _of_hub() if one.name != model.name]
    shared = {file for one in others for file in one.files}
    for file in model.files:
        if file not in shared:  # as a projector is
            file.unlink()
    if model.kind == SAFETENSORS or not any(map(is_gguf, _files(snapshot))):
        shutil.rmtree(snapshot)
    _drop_unlinked(folder)
    return before - _size_of(folder)


def remove_unfinished(download: Unfinished) -> int:
    """Remove the rest of an interrupted download; return the bytes freed."""
    size = download.num_bytes
    for file in download.files:
        file.unlink()
    _drop_unlinked(download.files[0].parents[1])
    return size


def _packaged(cache_dir: Path) -> Iterator[KeptModel]:
    for name, model in PACKAGED.items():
        path = cache_dir / "models" / model.filename
        if path.is_file():
            stat = path.stat()
            whole = stat.st_size == model.size
            used = max(stat.st_atime, stat.st_mtime)
            yield KeptModel(name, GGUF, (path,), used, complete=whole)


def _of_hub() -> Iterator[KeptModel]:
    for folder in _repositories():
        repo, commits = _repo_of(folder), _names_of_commits(folder)
        for snapshot in sorted(folder.glob("snapshots/*")):
            files = _files(snapshot)
            revision = commits.get(snapshot.name, snapshot.name)
            shown = None if revision == "main" else revision
            weights = [file for file in files if file.suffix == ".safetensors"]
            ggufs = [file for file in files if is_gguf(file)]
            if weights:
                rest = tuple(file for file in files if file not in ggufs)
                yield _kept(HubName(repo, shown), SAFETENSORS, rest)
            names = [str(file.relative_to(snapshot)) for file in ggufs]
            firsts = first_parts(names)
            models = [one for one in firsts if not is_projector(one) and not is_draft_head(one)]
            beside = {name: _beside(name, names) for name in models}
            used = {name for found in beside.values() for name in found}
            for name in first_parts([one for one in names if one not in used]):
                parts = parts_of_name(name)
                there = [part for part in parts if part in names]
                own = tuple(snapshot / one for one in (*there, *beside.get(name, ())))
                kept = _kept(HubName(repo, shown, parts[0]), GGUF, own)
                yield replace(kept, complete=there == [*parts])


def _beside(model: str, names: list[str]) -> list[str]:
    """Return the names of the projector and the parts of the draft head that a model takes."""
    heads = nearest_first(model, first_parts(names), is_draft_head)[:1]
    parts = [part for head in heads for part in parts_of_name(head) if part in names]
    return [*nearest_first(model, names)[:1], *parts]


def _kept(name: HubName, kind: str, files: tuple[Path, ...]) -> KeptModel:
    stats = [file.stat() for file in files]
    used = max(max(stat.st_atime, stat.st_mtime) for stat in stats)
    return KeptModel(str(name), kind, files, used)


def _matches(wanted: HubName, name: str) -> bool:
    """Return True if a name has all of the wanted parts."""
    found = HubName.parse(name)
    if found is None or found.repo != wanted.repo:
        return False
    revision = (found.revision or "main").startswith(wanted.revision or "")
    if wanted.file is None:
        return revision
    return revision and parts_of_name(wanted.file)[0] == found.file


def _repositories() -> list[Path]:
    return sorted(folder for folder in hub_cache().glob("models--*--*") if folder.is_dir())


def _repo_of(folder: Path) -> str:
    return folder.name.removeprefix("models--").replace("--", "/", 1)


def _names_of_commits(folder: Path) -> dict[str, str]:
    """Return the name of each named commit, preferring main."""
    refs = [path for path in sorted(folder.glob("refs/**/*")) if path.is_file()]
    named = {read_text(path).strip(): str(path.relative_to(folder / "refs")) for path in refs}
    main = folder / "refs" / "main"
    return {**named, read_text(main).strip(): "main"} if main in refs else named


def _files(snapshot: Path) -> list[Path]:
    """List the files of a snapshot, without broken links."""
    return sorted(path for path in snapshot.rglob("*") if path.is_file())


def _snapshot_of(model: KeptModel) -> Path:
    name = HubName.parse(model.name)
    assert name is not None
    snapshots = hub_cache() / folder_name(name.repo) / "snapshots"
    return snapshots / model.files[0].relative_to(snapshots).parts[0]


def _drop_unlinked(folder: Path) -> None:
    """Remove unlinked blobs, names of missing commits, and empty folders."""
    linked = {path.resolve() for path in folder.glob("snapshots/**/*") if path.is_symlink()}
    for blob in folder.glob("blobs/*"):
        if blob.suffix != ".incomplete" and blob.resolve() not in linked:
            blob.unlink()
    commits = {path.name for path in folder.glob("snapshots/*")}
    for ref in [path for path in folder.glob("refs/**/*") if path.is_file()]:
        if read_text(ref).strip() not in commits:
            ref.unlink()
    if not commits and not any(folder.glob("blobs/*")):
        shutil.rmtree(folder)


def _size_of(folder: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return sum(path.stat().st_size for path in folder.glob("blobs/*"))
    return 0
