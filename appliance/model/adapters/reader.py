"""Opens an adapter in any supported format and checks it against its model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.errors import AdapterError
from appliance.model.adapters.base_factors import on_base
from appliance.model.adapters.gguf_adapter import read_gguf
from appliance.model.adapters.peft_folder import read_folder
from appliance.model.adapters.peft_settings import CONFIG_NAME
from appliance.model.adapters.targets import adapter_targets
from appliance.model_files.gguf_names import is_gguf

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.model.adapters.adapter import Adapter
    from appliance.model.source import ModelSource


def read_adapter(path: Path, base: ModelSource, most_ranks: int) -> Adapter:
    """Read a PEFT folder or a GGUF adapter of llama.cpp.

    Args:
        most_ranks: largest rank of a linear.

    Raises:
        AdapterError: the adapter is unusable; names the field or tensor, and the fix.
    """
    targets = adapter_targets(base.spec, base.family.names)
    if path.is_dir():
        adapter = read_folder(path, base, targets)
    elif path.is_file() and is_gguf(path):
        adapter = read_gguf(path, base, targets)
    else:
        raise AdapterError(
            f"{path} is no adapter: give a folder with {CONFIG_NAME} and safetensors, or a .gguf"
            " file"
        )
    for name, part in adapter.parts.items():
        if part.rank > most_ranks:
            raise AdapterError(
                f"{path}: {name} has rank {part.rank}, and at most {most_ranks} are allowed;"
                f" start with --max-lora-rank {adapter.rank}"
            )
    return on_base(adapter, base)
