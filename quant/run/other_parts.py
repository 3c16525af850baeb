"""Parts of a checkpoint beside its decoder, which a quantized model keeps.

A draft head is stored in 16 bits. The parts of a model that reads pictures or sound are copied, so
that the result is as whole as its source; the linears in a tower's layers have 8 bits on request.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from appliance.errors import ApplianceError, QuantizeError
from appliance.model.draft_head import find_head
from appliance.model.tensors import Role, TensorSlot, tensor_slots
from appliance.model.text_part import TextPart
from appliance.model.tied_ends import untied
from appliance.model.vision.families.family import TOWER
from appliance.model.vision.families.registry import tower_family
from appliance.model.vision.mmproj import stored_layers
from appliance.model.vision.source import open_tower
from appliance.model_files.checkpoint import SafetensorsFolder, read_config
from appliance.model_files.files_beside import find_projector
from appliance.quant.formats.dense import DenseWeights
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.run.shard_writer import TensorLayout
from appliance.quant.walk.pieces import WeightPieces, row_ranges

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor

    from appliance.model.source import ModelSource
    from appliance.quant.formats import WeightReader

_SECTION = "text_config"  # of a whole model's config.json
_WEIGHT = ".weight"
_EIGHT_BITS = WeightScheme(8, 32)  # llama.cpp's Q8_0


@dataclass(frozen=True, slots=True, eq=False)
class OtherPart:
    """Tensors beside the decoder's.

    Attributes:
        what: it is, in words.
        weights: reads them; a folder's are copied.
        patterns: of their modules in compressed-tensors' form, since transformers loads some under
            other names than they are stored by.
        schemes: of those that are quantized, by the slot's name.
        modules: the names that transformers has for those, likewise.
    """

    what: str
    slots: tuple[TensorSlot, ...]
    weights: WeightReader | SafetensorsFolder
    patterns: tuple[str, ...] = ()
    schemes: Mapping[str, WeightScheme] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)

    @property
    def linears(self) -> list[str]:
        """Return the modules that other programs may take for quantized linears."""
        weights = (
            slot for slot in self.slots if len(slot.shape) == 2 and slot.name not in self.schemes
        )
        return [slot.name.removesuffix(_WEIGHT) for slot in weights]

    def layout(self, slot: TensorSlot, dtype: torch.dtype) -> TensorLayout:
        """Return how a tensor is stored: float32 matrices in `dtype`, other copies as they are."""
        if isinstance(self.weights, SafetensorsFolder):
            stored: torch.dtype = getattr(torch, self.weights.dtype(slot.name))
            if stored is not torch.float32 or len(slot.shape) < 2:
                dtype = stored
        return TensorLayout(slot.name, dtype, slot.shape)

    def rows(self, slot: TensorSlot, dtype: torch.dtype, elements: int) -> Iterator[Tensor]:
        """Yield a tensor's rows, about `elements` numbers at a time.

        Raises:
            QuantizeError: it is to be rounded, and holds NaN or infinity.
        """
        weights, ranges = self.weights, row_ranges(slot.shape or (1,), elements)
        if isinstance(weights, SafetensorsFolder):
            for rows in ranges:
                yield weights.load_rows(slot.name, rows.start, rows.stop).to(dtype)
            return
        pieces = self.pieces(slot)
        for rows in ranges:
            yield pieces.rows(rows).to(dtype)

    def pieces(self, slot: TensorSlot) -> WeightPieces:
        """Return what reads a tensor's rows in float32."""
        weights = self.weights
        if isinstance(weights, SafetensorsFolder):
            weights = DenseWeights(weights)
        return WeightPieces(weights, slot.name)


def other_parts(
    source: ModelSource, tower_bits: int = 16
) -> tuple[list[OtherPart], tuple[str, ...]]:
    """Return the parts that a folder of the model keeps, and notes for the user.

    Raises:
        QuantizeError: 8 bits are asked for a tower that is not there.
    """
    parts = []
    notes: tuple[str, ...] = ()
    try:
        head = find_head(source, in_torch=True)
    except ApplianceError as error:
        head, notes = None, (f"the head that drafts is left out: {error}",)
    if head is not None:
        slots = tuple(replace(slot, layer=None, expert=None) for slot in head.slots())
        parts.append(OtherPart("head that drafts", slots, head.source.weights))
        notes = ("the head that drafts keeps 16 bits, for --speculate mtp",)
    if (copied := _copied(source, parts)) is not None:
        if tower_bits == 8:
            copied = _with_eight_bits(source, copied)
            notes += (f"{len(copied.schemes)} weights of the tower have 8 bits",)
        parts.append(copied)
        kept = len(copied.slots) - len(copied.schemes)
        notes += (f"{kept} tensors of other parts, such as vision, are kept",)
    elif tower_bits == 8:
        raise QuantizeError(f"--tower 8: {source.path} has no vision tower; leave it out")
    elif source.path.is_file() and (projector := find_projector(source.path)) is not None:
        notes += (
            f"the result reads texts alone: {projector.name} is not part of a folder; --format gguf"
            " keeps it",
        )
    return parts, notes


def _with_eight_bits(source: ModelSource, part: OtherPart) -> OtherPart:
    """Quantize the linears in a tower's layers that groups of 32 inputs fill."""
    family, tower = tower_family(read_config(source.path)), open_tower(source.path)
    if family is None or tower is None:
        raise QuantizeError(f"--tower 8: {source.path} has a tower that is not known here")
    schemes, modules = {}, {}
    stored = {slot.name for slot in part.slots}
    for slot in tensor_slots(stored_layers(tower.spec), family.names):
        if not slot.is_linear or _EIGHT_BITS.fit(slot.shape[1])[0] is None:
            continue
        name = tower.weights.stored_name(slot.name)
        assert name in stored, name
        schemes[name] = _EIGHT_BITS
        newest, _ = family.places[0]
        modules[name] = (newest + slot.name.removeprefix(TOWER)).removesuffix(_WEIGHT)
    part = replace(part, schemes=schemes, modules=modules)
    others = (name.removeprefix("model.") for name in part.linears)
    return replace(part, patterns=tuple(rf"re:(.*\.)?{re.escape(name)}" for name in others))


def _copied(source: ModelSource, others: list[OtherPart]) -> OtherPart | None:
    """Return what a model that reads more than text has beside its text and its head."""
    weights = source.weights
    if not isinstance(weights, TextPart) or _SECTION not in read_config(source.path):
        return None
    folder = SafetensorsFolder(source.path)
    read = {slot.name for part in others for slot in part.slots}
    left = [name for name in weights.left if name not in read]
    if not left:
        return None
    # A quantized weight has several names in the folder, and is stored in 16 bits.
    is_plain = set(left) <= set(folder.tensor_names())
    slots = tuple(TensorSlot(name, weights.shape(name), Role.OTHER_PART) for name in left)
    family = tower_family(read_config(source.path))
    places = () if family is None else chain.from_iterable(family.places)
    tops = {_top(name) for name in (*left, *filter(None, places))}
    tops -= {_top(slot.name) for slot in source.slots()}
    patterns = tuple(rf"re:(.*\.)?{re.escape(top)}\..*" for top in sorted(tops))
    return OtherPart("other parts", slots, folder if is_plain else weights, patterns)


def _top(name: str) -> str:
    return name.removeprefix("model.").partition(".")[0]


def config_with(
    parts: Iterable[OtherPart], source: ModelSource, config: dict[str, Any]
) -> dict[str, Any]:
    """Return the config.json of a model with some parts.

    Args:
        config: of the text; its `dtype` and `quantization_config` are the whole's.
    """
    if not any(slot.role is Role.OTHER_PART for part in parts for slot in part.slots):
        return config
    whole = read_config(source.path)
    whole.pop("torch_dtype", None)
    whole[_SECTION] = {**whole[_SECTION], "dtype": config["dtype"]}
    for key in ("dtype", "quantization_config"):
        if key in config:
            whole[key] = config[key]
        else:
            whole.pop(key, None)
    return whole if source.spec.tied_head else untied(whole)
