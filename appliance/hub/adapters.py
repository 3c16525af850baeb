"""Resolves an adapter's name to a folder or file on this machine."""

from __future__ import annotations

from pathlib import Path

from appliance.config.values import as_text, named_paths
from appliance.errors import AdapterError, ModelError
from appliance.hub import remote
from appliance.hub.growth import Progress, ignore_progress
from appliance.hub.name import HubName
from appliance.model_files.gguf_names import is_gguf

_FILES = ("adapter_config.json", "adapter_model.safetensors")


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
