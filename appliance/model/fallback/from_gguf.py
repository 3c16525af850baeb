"""GGUF files of classes that transformers' modules run: their settings and tensors as a folder's.

A file is read as llama.cpp's converter writes it (its conversion/*.py, and gguf's table of names).
Imports no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.errors import CheckpointError
from appliance.kernels import arrays
from appliance.kernels.weight import dense
from appliance.model.families.gguf_config import gguf_config
from appliance.model.families.limits import short
from appliance.model.gguf_tensors import FREQUENCY_DIVISORS, is_unused
from appliance.model.gguf_weights import GGUFReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor

    from appliance.gguf import GGUFFile
    from appliance.kernels.weight import Weight
    from appliance.model.families.reader import ConfigReader
    from appliance.model.tensors import TensorSlot

_STORED = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>.+?)(?P<kind>\.weight|\.bias)?")
_ENDS = (".weight", ".bias")
_LARGEST = 1e6  # of numbers among settings


@dataclass(frozen=True, slots=True)
class GGUFClass:
    """The files of one label, and the class of transformers that runs them.

    Attributes:
        config: reads the settings beside those that all labels share.
        names: modules of a checkpoint by those of a file, in which `blk.` stands for any layer. The
            ending `.weight` or `.bias` is the same. `{layer}` is the layer, `{part}` the number of
            one of the matrices that the file stacks.
        whole: the same with full names, where the ending differs.
        changes: make a checkpoint's tensor of a file's, by the file's full name.
        numbers: full names of a checkpoint's tensors that the file has among its settings, a number
            per layer, with their shapes.
    """

    architecture: str
    model_type: str
    config: Callable[[ConfigReader, GGUFFile], dict[str, Any]]
    names: Mapping[str, str]
    whole: Mapping[str, str] = field(default_factory=dict)
    changes: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    numbers: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)

    def settings(self, file: GGUFFile, label: str) -> dict[str, Any]:
        """Return the Hugging Face config; raise as `gguf_config` does."""
        found = gguf_config(file, label, self.config)
        return found | {"architectures": [self.architecture], "model_type": self.model_type}

    def places(self, file: GGUFFile, layers: int) -> dict[str, GGUFPlace]:
        """Return where the tensors of a checkpoint are in a file, by their names in it."""
        found: dict[str, GGUFPlace] = {}
        for stored in file.tensor_names():
            own, layer, key = self._own(stored)
            if own is None:
                continue
            change = self.changes.get(key)
            if "{part}" in own:
                for part in range(file.shape(stored)[0]):
                    found[own.format(layer=layer, part=part)] = GGUFPlace(stored, part)
            else:
                found[own.format(layer=layer)] = GGUFPlace(stored, change=change)
        for setting, (pattern, shape) in self.numbers.items():
            for index, number in enumerate(_per_layer(file, setting, layers)):
                value = np.full(shape, number, np.float32)
                found[pattern.format(layer=index)] = GGUFPlace(
                    setting, value=arrays.of_numpy(value)
                )
        return found

    def _own(self, stored: str) -> tuple[str | None, str | None, str]:
        """Return the pattern of a stored tensor's name in a checkpoint, its layer, and its key."""
        place = _STORED.fullmatch(stored)
        assert place is not None
        stem = f"blk.{place['part']}" if place["layer"] else place["part"]
        key = stem + (place["kind"] or "")
        own = self.names.get(stem)
        if own is not None:
            own += place["kind"] or ".weight"
        return self.whole.get(key, own), place["layer"], key

    def stored_name(self, name: str) -> str:
        """Return what a file calls a checkpoint's tensor."""
        of_modules = ((own + end, key + end) for key, own in self.names.items() for end in _ENDS)
        of_numbers = ((own, key) for key, (own, _) in self.numbers.items())
        for own, key in (
            *of_modules,
            *((own, key) for key, own in self.whole.items()),
            *of_numbers,
        ):
            pattern = re.escape(own).replace(r"\{layer\}", r"(\d+)").replace(r"\{part\}", r"\d+")
            if (found := re.fullmatch(pattern, name)) is not None:
                return key.replace("blk.", f"blk.{found[1]}.", 1) if "blk." in key else key
        return name


@dataclass(frozen=True, slots=True)
class GGUFPlace:
    """A tensor of a checkpoint in a file.

    Attributes:
        stored: the file's tensor, or its setting.
        part: number of its matrix in a stack.
        value: of a tensor that is a setting.
    """

    stored: str
    part: int | None = None
    change: Callable[[Tensor], Tensor] | None = None
    value: Tensor | None = None


class WeightsOfClass(GGUFReader):
    """A file's tensors under the names of transformers' modules; quantized ones keep their codes.

    Args:
        places: of all tensors, by those names.
        slots: tensors that the modules read.
    """

    def __init__(
        self,
        file: GGUFFile,
        of: GGUFClass,
        places: Mapping[str, GGUFPlace],
        slots: Iterable[TensorSlot],
    ) -> None:
        super().__init__(file)
        self._of = of
        self._places = places
        self._slots = {slot.name for slot in slots}

    def tensor_names(self) -> list[str]:
        return list(self._places)

    def usual_name(self, name: str) -> str:
        return self._of.stored_name(name)

    def unplaced(self) -> list[str]:
        held = {place.stored for name, place in self._places.items() if name in self._slots}
        left = (name for name in self._file.tensor_names() if name not in held)
        return sorted(n for n in left if not is_unused(n) and n != FREQUENCY_DIVISORS)

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._places[name]
        if place.value is not None:
            return tuple(place.value.shape)
        shape = tuple(self._file.shape(place.stored))
        if place.part is not None:
            return shape[1:]
        return shape if place.change is None else self._changed_shape(place, shape)

    def _changed_shape(self, place: GGUFPlace, shape: tuple[int, ...]) -> tuple[int, ...]:
        assert place.change is not None
        return tuple(
            place.change(arrays.in_torch(arrays.of_numpy(np.ones(shape, np.float32)))).shape
        )

    def _matrix(self, name: str) -> str | None:
        place = self._places[name]
        is_stored = place.change is None and place.value is None
        return place.stored if is_stored and len(self.shape(name)) == 2 else None

    def load_rows(self, name: str, start: int, stop: int) -> Weight:
        place = self._places[name]
        if place.value is not None:
            value: Tensor = arrays.in_torch(place.value)
            return value
        if place.change is None:
            return self._file.load_rows(place.stored, start, stop, part=place.part)
        whole = arrays.in_torch(dense(self._file.load(place.stored), "float32"))
        return place.change(whole)[start:stop]


def _per_layer(file: GGUFFile, setting: str, layers: int) -> list[float]:
    """Read a setting without an architecture's prefix, of all layers or each."""
    value = file.metadata.get(setting)
    listed = value if isinstance(value, list) else [value] * layers
    numbers = [float(n) for n in listed if isinstance(n, int | float) and abs(n) < _LARGEST]
    if len(numbers) != len(listed) or len(numbers) != layers:
        raise CheckpointError(
            f"{file.path}: {setting} is {short(value)}, but must be {layers} numbers, one for each"
            " layer; use another file of the model"
        )
    return numbers
