"""Reads adapters that PEFT saved: a folder with settings and a safetensors file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING

from appliance.errors import AdapterError
from appliance.files import read_bytes
from appliance.model.adapters.adapter import Adapter
from appliance.model.adapters.factors import Factors
from appliance.model.adapters.peft_settings import CONFIG_NAME, read_settings
from appliance.model.adapters.targets import unserved_linears
from appliance.model.text_part import prefix_of_layers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from torch import Tensor

    from appliance.model.adapters.peft_settings import LoraSettings
    from appliance.model.adapters.targets import AdapterTarget
    from appliance.model.names import TensorNames
    from appliance.model.source import ModelSource

WEIGHTS_NAME = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<which>[AB])(\.default)?\.weight")
# Other tensors that PEFT writes, with the field that asks for them.
_REFUSED = (
    ("lora_magnitude_vector", "is of DoRA (use_dora), which is not supported"),
    ("lora_embedding_", "changes an embedding, which is not supported: train without embed_tokens"),
    (".bias", "is a bias (bias, lora_bias), which is not supported"),
    ("trainable_tokens_delta", "replaces tokens (trainable_token_indices), which is not supported"),
)


@dataclass(frozen=True, slots=True)
class _Spelling:
    """Prefixes of the layers' names.

    An adapter has those of the class that it was trained on, which may be the text alone or one of
    more parts, whatever the base's checkpoint has.
    """

    own: str
    base: str

    @classmethod
    def of(cls, tensors: Iterable[str], names: TensorNames) -> _Spelling:
        base = prefix_of_layers(names.layer)
        modules = (name.removeprefix(_PREFIX) for name in tensors)
        found = (prefix_of_layers(module) for module in modules)
        own = next((prefix for prefix in found if prefix is not None), None)
        return cls("", "") if own is None or base is None else cls(own, base)

    def as_base(self, module: str) -> str:
        """Return the base's name of one of the adapter's modules."""
        is_text = prefix_of_layers(module) == self.own
        return self.base + module.removeprefix(self.own) if is_text else module

    def as_own(self, module: str) -> str:
        """Return the adapter's name of one of the base's modules."""
        is_text = prefix_of_layers(module) == self.base
        return self.own + module.removeprefix(self.base) if is_text else module


def read_folder(path: Path, base: ModelSource, targets: Mapping[str, AdapterTarget]) -> Adapter:
    """Read and check an adapter.

    Raises:
        AdapterError: a file is missing or damaged, or asks for something unsupported.
    """
    text = _content(path, CONFIG_NAME)
    settings = read_settings(path / CONFIG_NAME, text)
    data = _content(path, WEIGHTS_NAME)
    digest = blake2b(text, digest_size=16)
    digest.update(data)
    factors = Factors(path, targets, partial(unserved_linears, base.spec, base.family.names))
    tensors = _tensors(path, data)
    spelling = _Spelling.of(tensors, base.family.names)
    for stored, tensor in tensors.items():
        found = _FACTOR.fullmatch(stored)
        if found is None:
            raise _refusal(factors, stored)
        module = spelling.as_base(found["module"].removeprefix(_PREFIX))
        factors.add(stored, module, is_first=found["which"] == "A", factor=tensor)
    parts = factors.paired(lambda module, rank: settings.scale_of(spelling.as_own(module)))
    _check_complete(path, settings, targets, parts.keys(), spelling)
    for module, part in parts.items():
        if part.rank != settings.rank_of(spelling.as_own(module)):
            raise AdapterError(
                f"{path}: {module} has rank {part.rank}, but r and rank_pattern of {CONFIG_NAME}"
                f" say {settings.rank_of(module)}; download the adapter again"
            )
    notes = factors.notes(settings.base, base.path.name)
    return Adapter(digest.hexdigest(), parts, notes)


def _content(path: Path, name: str) -> bytes:
    try:
        return read_bytes(path / name)
    except FileNotFoundError:
        beside = [file.name for file in sorted(path.glob("adapter_model*"))]
        fix = (
            f"it has {', '.join(beside)}: save it again with save_pretrained("
            "safe_serialization=True)"
            if beside and name == WEIGHTS_NAME
            else "download the adapter again"
        )
        raise AdapterError(f"{path} has no {name}; {fix}") from None
    except OSError as error:
        raise AdapterError(f"{path / name} cannot be read: {error}") from None


def _tensors(path: Path, data: bytes) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(data)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise AdapterError(
            f"{path / WEIGHTS_NAME} is no usable safetensors file: {error}; download it again"
        ) from None


def _refusal(factors: Factors, stored: str) -> AdapterError:
    for part, why in _REFUSED:
        if part in stored:
            return factors.wrong(stored, f"{why}; merge the adapter into the model")
    return factors.wrong(
        stored,
        "is no factor of a LoRA but a weight of its own (modules_to_save); merge the adapter into"
        " the model",
    )


def _check_complete(
    path: Path,
    settings: LoraSettings,
    targets: Mapping[str, AdapterTarget],
    present: object,
    spelling: _Spelling,
) -> None:
    """Check that factors and settings name the same linears."""
    assert hasattr(present, "__contains__")
    for module in targets:
        if settings.wants(spelling.as_own(module)) == (module in present):
            continue
        if module in present:
            raise AdapterError(
                f"{path}: there are factors of {module}, which target_modules of {CONFIG_NAME} do"
                " not name; the two files do not belong together"
            )
        raise AdapterError(
            f"{path}: target_modules of {CONFIG_NAME} name {module}, but {WEIGHTS_NAME} has no"
            " factors of it; download the adapter again"
        )
