"""Maps the adapter names that requests use to files.

Looks at the files on each request, so a changed file takes effect at once. Imports no torch.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.config.values import named_paths
from appliance.engine.nouns.request import AdapterRef
from appliance.errors import ConfigError
from appliance.files import stamp_of
from appliance.model_files.gguf_names import is_gguf

if TYPE_CHECKING:
    from appliance.config import EngineConfig

CONFIG_NAME = "adapter_config.json"  # a folder that PEFT saved has it
NAME = re.compile(r"[\w-][\w.-]{0,127}")  # neither a path nor a hidden file
LATEST = ":latest"  # Ollama's clients append it


class AdapterRegistry:
    """Names of adapters and their files.

    Args:
        model_id: the base model's id.

    Raises:
        ConfigError: an adapter has the base model's name.
    """

    def __init__(self, config: EngineConfig, model_id: str) -> None:
        self._model_id = model_id
        self._folder = None if config.lora_dir is None else Path(config.lora_dir).resolve()
        self._paths = {
            name: Path(path).absolute() for name, path in named_paths(config.lora, "lora").items()
        }
        self._unloaded: set[str] = set()  # removed by request though the folder has them
        if model_id in self._paths:
            raise ConfigError(f"lora has an adapter {model_id!r}, which is the model's own name")

    @property
    def folder(self) -> Path | None:
        return self._folder

    def names(self) -> list[str]:
        """List the adapters given by name, then those in the folder."""
        found = dict.fromkeys(self._paths)
        if self._folder is not None and self._folder.is_dir():
            for path in sorted(self._folder.iterdir()):
                name = path.stem if is_gguf(path) else path.name
                if self._in_folder(name) is not None:
                    found[name] = None
        return list(found)

    def find(self, asked: str | None) -> AdapterRef | None:
        """Return the adapter that a request names as its model, or None.

        Args:
            asked: `ADAPTER` or `MODEL:ADAPTER`.
        """
        if asked is None or asked == self._model_id:
            return None
        for name in (asked, asked.removesuffix(LATEST)):
            own = name.removeprefix(f"{self._model_id}:")
            path = self._paths.get(own) or self._in_folder(own)
            if path is not None and (stamp := stamp_of(path)):
                return AdapterRef(own, str(path), stamp)
        return None

    def add(self, name: str, path: Path) -> None:
        self._paths[name] = path
        self._unloaded.discard(name)

    def remove(self, name: str) -> None:
        """Hide a name until it is added again."""
        self._paths.pop(name, None)
        self._unloaded.add(name)

    def _in_folder(self, name: str) -> Path | None:
        if self._folder is None or name in (self._model_id, *self._unloaded):
            return None
        if not NAME.fullmatch(name):
            return None
        folder, file = self._folder / name, self._folder / f"{name}.gguf"
        if (folder / CONFIG_NAME).is_file():
            return folder
        return file if file.is_file() else None
