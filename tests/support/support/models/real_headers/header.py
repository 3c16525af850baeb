"""The settings that a maker published with a model, without its weights."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
# Files with settings of weights that lie beside config.json.
QUANTIZATION = (
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "quantization_config.json",
)


@dataclass(frozen=True, slots=True)
class Header:
    """The header in one folder.

    Attributes:
        beside: other files with settings, by name; the index is not among them.
        index: of the weights; None if the folder has none.
    """

    name: str
    config: dict[str, Any]
    beside: dict[str, dict[str, Any]] = field(default_factory=dict)
    index: dict[str, Any] | None = None

    @property
    def quantization(self) -> dict[str, Any] | None:
        """The settings of quantized weights, from config.json or the file beside it."""
        for section in (self.config, self.config.get("text_config")):
            for key in ("quantization_config", "compression_config", "quantization"):
                found = section.get(key) if isinstance(section, dict) else None
                if isinstance(found, dict):
                    return self._completed(found)
        for file in QUANTIZATION:
            if file in self.beside:
                return self._completed(self.beside[file])
        return None

    def _completed(self, found: dict[str, Any]) -> dict[str, Any]:
        """Bring ModelOpt's two files into one form."""
        own = found.get("quantization", found)
        other = self.beside.get("hf_quant_config.json", {}).get("quantization", {})
        method = found.get("quant_method") or ("modelopt" if "quant_algo" in own else None)
        if method is None and "bits" in own and self.beside.keys() & set(QUANTIZATION):
            method = "awq" if "quant_config.json" in self.beside else "gptq"
        ignore = own.get("ignore") or own.get("exclude_modules") or other.get("exclude_modules")
        return {**other, **own, "quant_method": method, "ignore": ignore or []}


def headers_in(folder: Path) -> Iterator[Header]:
    """Read each folder with a config.json, in the order of their names."""
    for path in sorted(folder.glob(f"*/{CONFIG}")):
        yield read_header(path.parent)


def read_header(folder: Path) -> Header:
    config = json.loads((folder / CONFIG).read_text())
    wanted = ("generation_config.json", *QUANTIZATION)
    beside = {
        name: json.loads((folder / name).read_text())
        for name in wanted
        if (folder / name).is_file()
    }
    index = folder / INDEX
    return Header(
        folder.name,
        config,
        beside,
        json.loads(index.read_text()) if index.is_file() else None,
    )
