"""Parts of a checkpoint beside its decoder, which a quantized model keeps.

A draft head is stored in 16 bits. The parts of a model that reads pictures or sound are copied, so
that the result is as whole as its source.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from appliance.errors import ApplianceError
from appliance.model.draft_head import find_head
from appliance.model.tensors import Role, TensorSlot
from appliance.model.text_part import TextPart
from appliance.model.tied_ends import untied
from appliance.model.vision.families.registry import tower_family
from appliance.model_files.checkpoint import SafetensorsFolder, read_config
from appliance.quant.run.shard_writer import TensorLayout
from appliance.quant.walk.pieces import WeightPieces, row_ranges

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from appliance.model.source import ModelSource
    from appliance.quant.formats import WeightReader

_SECTION = "text_config"  # of a whole model's config.json
_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True, eq=False)
class OtherPart:
    """Tensors that are not quantized.

    Attributes:
        what: it is, in words.
        weights: reads them; a folder's are copied.
        patterns: of their modules in compressed-tensors' form, since transformers loads some under
            other names than they are stored by.
    """

    what: str
    slots: tuple[TensorSlot, ...]
    weights: WeightReader | SafetensorsFolder
    patterns: tuple[str, ...] = ()

    @property
    def linears(self) -> list[str]:
        """Return the modules that other programs may take for quantized linears."""
        weights = (slot for slot in self.slots if len(slot.shape) == 2)
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
        pieces = WeightPieces(weights, slot.name)
        for rows in ranges:
            yield pieces.rows(rows).to(dtype)


def other_parts(source: ModelSource) -> tuple[list[OtherPart], tuple[str, ...]]:
    """Return the parts that a folder of the model keeps, and notes for the user."""
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
        parts.append(copied)
        notes += (f"{len(copied.slots)} tensors of other parts, such as vision, are kept",)
    return parts, notes


def _copied(source: ModelSource, others: list[OtherPart]) -> OtherPart | None:
    """Return what a model that reads more than text has beside its text and its head."""
    weights = source.weights
    if not isinstance(weights, TextPart) or _SECTION not in read_config(source.path):
        return None
    folder = SafetensorsFolder(source.path)
    read = {slot.name for part in others for slot in part.slots}
    left = [name for name in weights.left if name not in read]
    # A quantized weight has several names in the folder, and a config of its own.
    if not left or not set(left) <= set(folder.tensor_names()):
        return None
    slots = tuple(TensorSlot(name, folder.shape(name), Role.OTHER_PART) for name in left)
    family = tower_family(read_config(source.path))
    places = () if family is None else chain.from_iterable(family.places)
    tops = {_top(name) for name in (*left, *filter(None, places))}
    tops -= {_top(slot.name) for slot in source.slots()}
    patterns = tuple(rf"re:(.*\.)?{re.escape(top)}\..*" for top in sorted(tops))
    return OtherPart("other parts", slots, folder, patterns)


def _top(name: str) -> str:
    return name.removeprefix("model.").partition(".")[0]


def config_with(
    parts: Iterable[OtherPart], source: ModelSource, config: dict[str, Any]
) -> dict[str, Any]:
    """Return the config.json of a model with some parts.

    Args:
        config: of the text; its `dtype` and `quantization_config` are the whole's.
    """
    if not any(isinstance(part.weights, SafetensorsFolder) for part in parts):
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
