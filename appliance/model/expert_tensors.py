"""Presents a layer's experts one by one if a checkpoint stores them together.

Checkpoints may stack the weights of all experts in one tensor, put gate and up into one matrix, or
both: as halves or alternating rows, outputs first or inputs first. Knows no family.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.kernels import arrays
from appliance.kernels.weights.fp4 import Fp4Weight
from appliance.kernels.weights.fp8 import Fp8Weight
from appliance.model.spec import ExpertsSpec
from appliance.model.tensors import Role, tensor_slots
from appliance.quant.formats.dense import DenseWeights

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.weights.weight import Weight
    from appliance.model.names import ExpertNames, TensorNames
    from appliance.model.spec import DecoderSpec
    from appliance.model.tensors import TensorSlot
    from appliance.quant.formats import WeightReader

_OTHER_WAY = "quantize the 16-bit model that it was made from with appliance quantize"


def separate_experts(
    weights: WeightReader, spec: DecoderSpec, names: TensorNames, where: str
) -> WeightReader:
    """Return a reader with a tensor per expert, in whatever form they are stored.

    Raises:
        CheckpointError: a stored tensor has the wrong shape; `where` names the model.
    """
    present = frozenset(weights.tensor_names())
    parts: dict[str, _Part] = {}
    for slot in tensor_slots(spec, names):
        part = None if slot.name in present else _find(slot, spec, names, present)
        if part is None:
            continue
        part = part.as_stored(weights.shape(part.stored))
        if weights.shape(part.stored) != part.stored_shape:
            raise CheckpointError(
                f"{where}: tensor {part.stored} has shape {weights.shape(part.stored)}, but the "
                f"model's settings ask for {part.stored_shape};"
                " take config.json and weights of one revision"
            )
        parts[slot.name] = part
    return SeparatedExperts(weights, parts) if parts else weights


@dataclass(frozen=True, slots=True)
class _Part:
    """An expert's part of a stored tensor.

    Attributes:
        stored_shape: expected shape of the stored tensor.
        expert: its index in a stack; None if the stored tensor holds one expert.
        first: its first row in the stored matrix.
        step: distance between its rows.
        transposed: the stored matrix has inputs before outputs.
    """

    stored: str
    stored_shape: tuple[int, ...]
    expert: int | None
    shape: tuple[int, ...]
    first: int = 0
    step: int = 1
    transposed: bool = False

    def as_stored(self, shape: tuple[int, ...]) -> _Part:
        """Return the part of a stack that has the other side first, if its shape says so.

        Qwen3-VL's makers store inputs first; transformers and mergers save outputs first.
        """
        if self.expert is None or len(shape) != 3 or shape == self.stored_shape:
            return self
        turned = (shape[0], shape[2], shape[1])
        if turned != self.stored_shape:
            return self
        return replace(self, stored_shape=shape, transposed=not self.transposed)

    def outputs(self, start: int, stop: int) -> slice:
        """Return the stored rows of rows `start` to `stop`."""
        last = self.first + (stop - 1) * self.step + 1
        return slice(self.first + start * self.step, last, self.step)


def _find(
    slot: TensorSlot, spec: DecoderSpec, names: TensorNames, present: frozenset[str]
) -> _Part | None:
    """Find the stored tensor that holds an expert's; None if there is none."""
    if slot.expert is None or slot.layer is None:
        return None
    mlp = spec.layers[slot.layer].mlp
    assert isinstance(mlp, ExpertsSpec)
    module = names.in_layer(slot.layer, _stack(slot, names.experts))
    is_bias = len(slot.shape) == 1
    count, rows = mlp.router.num_experts, slot.shape[0]
    first, step = 0, 1
    if slot.role is not Role.DOWN and mlp.gated and names.experts.stacked_apart is None:
        rows *= 2
        turns = names.experts.takes_turns
        first = (1 if turns else slot.shape[0]) if slot.role is Role.UP else 0
        step = 2 if turns else 1
    group, _, linear = module.rpartition(".")
    suffix = "bias" if is_bias else "weight"
    if (single := f"{group}.{slot.expert}.{linear}.{suffix}") in present:
        return _Part(single, (rows, *slot.shape[1:]), None, slot.shape, first, step)
    stored = f"{module}_bias" if is_bias else module
    if stored not in present:
        return None
    transposed = names.experts.transposed and not is_bias
    matrix = (*slot.shape[1:], rows) if transposed else (rows, *slot.shape[1:])
    return _Part(stored, (count, *matrix), slot.expert, slot.shape, first, step, transposed)


def _stack(slot: TensorSlot, names: ExpertNames) -> str:
    if slot.role is Role.DOWN:
        return names.stacked_down
    if names.stacked_apart is not None:
        return names.stacked_apart[slot.role is Role.UP]
    return names.stacked_gate_up


class SeparatedExperts:
    """A `WeightReader` that cuts experts' tensors out of stored stacks.

    It keeps the last matrix with inputs before outputs whose outputs are read in pieces.
    """

    def __init__(self, weights: WeightReader, parts: dict[str, _Part]) -> None:
        self._weights = weights
        self._parts = parts
        self._lock = Lock()
        self._last: tuple[tuple[str, int | None], Tensor] | None = None

    def tensor_names(self) -> list[str]:
        """List all tensors, with each expert's instead of stacks."""
        stored = {part.stored for part in self._parts.values()}
        rest = [name for name in self._weights.tensor_names() if name not in stored]
        return [*rest, *self._parts]

    def shape(self, name: str) -> tuple[int, ...]:
        part = self._parts.get(name)
        return self._weights.shape(name) if part is None else part.shape

    def packed_bits(self, name: str) -> int | None:
        return self._weights.packed_bits(self._stored(name))

    def group_size(self, name: str) -> int | None:
        return self._weights.group_size(self._stored(name))

    def float_bits(self, name: str) -> int | None:
        return self._weights.float_bits(self._stored(name))

    def notes(self) -> tuple[str, ...]:
        return self._weights.notes()

    def load(self, name: str) -> Weight:
        part = self._parts.get(name)
        if part is None:
            return self._weights.load(name)
        return self._rows(part, 0, part.shape[0])

    def load_rows(self, name: str, start: int, stop: int) -> Tensor:
        part = self._parts.get(name)
        if part is None:
            assert isinstance(self._weights, DenseWeights), name
            return self._weights.load_rows(name, start, stop)
        rows = self._rows(part, start, stop, in_pieces=True)
        assert arrays.is_array(rows), name
        return rows

    def _rows(self, part: _Part, start: int, stop: int, *, in_pieces: bool = False) -> Weight:
        outputs = part.outputs(start, stop)
        if part.expert is None or len(part.shape) == 1:
            whole = self._weights.load(part.stored)
            if isinstance(whole, Fp4Weight):
                return whole.rows(outputs)
            assert arrays.is_array(whole), part.stored
            return (whole if part.expert is None else whole[part.expert])[outputs].contiguous()
        if not isinstance(self._weights, DenseWeights):
            raise UnsupportedModelError(
                f"{part.stored} is a stack of experts among weights quantized in a form that has"
                f" none here; {_OTHER_WAY}"
            )
        if (coded := self._coded(part, outputs)) is not None:
            return coded
        if part.transposed:
            matrix = self._kept(part) if in_pieces else self._turned(part)
            return matrix[:, outputs].T.contiguous()
        matrix = self._weights.load_part(part.stored, part.expert, outputs.start, outputs.stop)
        return matrix[:: part.step].contiguous()

    def _coded(self, part: _Part, outputs: slice) -> Fp8Weight | None:
        """Load an expert's part of a stack that is stored quantized; None: it is not."""
        assert isinstance(self._weights, DenseWeights)
        assert part.expert is not None
        found = self._weights.load_matrix(part.stored, part.expert, transposed=part.transposed)
        if found is None:
            return None
        assert isinstance(found, Fp8Weight), part.stored
        rows = found.rows(outputs.start, outputs.stop) if part.step == 1 else None
        if rows is None:
            raise UnsupportedModelError(
                f"{part.stored} has scales of blocks that hold rows of gate and of up; {_OTHER_WAY}"
            )
        return rows

    def _kept(self, part: _Part) -> Tensor:
        with self._lock:
            if self._last is None or self._last[0] != (part.stored, part.expert):
                self._last = None  # two would be in memory
                self._last = (part.stored, part.expert), self._turned(part)
            return self._last[1]

    def _turned(self, part: _Part) -> Tensor:
        """Read the whole stored matrix (inputs, outputs) of an expert."""
        assert part.expert is not None
        assert isinstance(self._weights, DenseWeights), "a stack of quantized weights"
        return self._weights.load_part(part.stored, part.expert, 0, part.shape[1])

    def _stored(self, name: str) -> str:
        part = self._parts.get(name)
        return name if part is None else part.stored
