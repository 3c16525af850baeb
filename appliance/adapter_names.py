"""The names under which adapters are asked for, and the files that they stand for.

Files are looked at anew each time, so that a name always stands for what lies there now. Imports no
torch.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.config.named_paths import named_paths
from appliance.engine.request import AdapterRef
from appliance.errors import ConfigError
from appliance.files import stamp_of

if TYPE_CHECKING:
    from appliance.config import EngineConfig

CONFIG_NAME = "adapter_config.json"  # of a folder that PEFT saved
NAME = re.compile(r"[\w-][\w.-]{0,127}")  # no path, and no hidden file
_LATEST = ":latest"  # Ollama's clients add it


class AdapterRegistry:
    """Names of adapters with their files.

    Args:
        config: the settings of the engine.
        model_id: of the model that adapters change.

    Raises:
        ConfigError: an adapter has the model's own name.
    """

    def __init__(self, config: EngineConfig, model_id: str) -> None:
        self._model_id = model_id
        self._folder = None if config.lora_dir is None else Path(config.lora_dir).resolve()
        self._paths = {
            name: Path(path).absolute() for name, path in named_paths(config.lora, "lora").items()
        }
        self._unloaded: set[str] = set()  # of the folder
        if model_id in self._paths:
            raise ConfigError(f"lora has an adapter {model_id!r}, which is the model's own name")

    @property
    def folder(self) -> Path | None:
        """The only folder from which adapters are loaded by request."""
        return self._folder

    def names(self) -> list[str]:
        """List all names: those given, then those of the folder."""
        found = dict.fromkeys(self._paths)
        if self._folder is not None and self._folder.is_dir():
            for path in sorted(self._folder.iterdir()):
                name = path.stem if path.suffix == ".gguf" else path.name
                if self._in_folder(name) is not None:
                    found[name] = None
        return list(found)

    def find(self, asked: str | None) -> AdapterRef | None:
        """Return the adapter that a request names as its model; None if it names none.

        Args:
            asked: the adapter's name, alone or behind the model's and a colon.
        """
        if asked is None or asked == self._model_id:
            return None
        for name in (asked, asked.removesuffix(_LATEST)):
            own = name.removeprefix(f"{self._model_id}:")
            path = self._paths.get(own) or self._in_folder(own)
            if path is not None and (stamp := stamp_of(path)):
                return AdapterRef(own, str(path), stamp)
        return None

    def add(self, name: str, path: Path) -> None:
        """Serve an adapter under a name."""
        self._paths[name] = path
        self._unloaded.discard(name)

    def remove(self, name: str) -> None:
        """Serve a name no more until it is added again."""
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
