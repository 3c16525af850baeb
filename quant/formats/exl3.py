"""Reads folders of EXL3, the format of ExLlamaV3: symbols of a trellis, held in 8 bits here.

A weight M.weight is stored transposed and rotated. M.trellis (inputs / 16, outputs / 16, 16 * bits)
int16 has the symbols of tiles of 16 x 16, each one closed sequence of 256 symbols: the first is in
the highest bits of the first word, and the words of each pair have changed places. The last 16 bits
up to a symbol's end are a number whose hash is the value. Blocks of 128 inputs and 128 outputs are
rotated by a Hadamard transform; M.suh (inputs,) and M.svh (outputs,) scale what is rotated back.
Widths that 128 does not divide are padded. The layout belongs to the exllamav3 project (4f8ad01).
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.kernels import arrays
from appliance.kernels.weights.packed import SMALLEST_GROUP, OffsetKind, PackedWeight
from appliance.quant.formats.dense import DenseWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray
    from torch import Tensor

    from appliance.kernels.weights.weight import Weight
    from appliance.model_files.checkpoint import SafetensorsFolder

METHOD = "exl3"  # quant_method in config.json
BLOCK, TILE = 128, 16
BITS = range(1, 9)
OUTPUTS_AT_ONCE = 16 * BLOCK
_WEIGHT, _BIAS, _TRELLIS = ".weight", ".bias", ".trellis"
_SCALES = ((".suh", ".su"), (".svh", ".sv"))  # numbers, or their signs alone
_CODEBOOKS = (".mcg", ".mul1")  # tensors that hold the multiplier of another hash
_PARTS = (_TRELLIS, *_SCALES[0], *_SCALES[1], *_CODEBOOKS)
# Linears that ExLlamaV3 stores apart, by the one that they are in the model's own folder.
_JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
# Families whose experts ExLlamaV3 stores scaled, and scales back while it runs.
_SCALED_EXPERTS = ("mistral4", "laguna")
_WAY = (
    "take the 16-bit model that this one was made from and run appliance quantize MODEL, or serve"
    " this one with TabbyAPI"
)
HELD = (
    "EXL3's weights, of {bits} bits in the folder, are held in 8 bits in groups of 128 inputs or"
    " fewer; for fewer bits in memory, quantize the 16-bit model that they were made from with"
    " appliance quantize"
)


class Exl3Weights(DenseWeights):
    """Reads EXL3 weights, one tensor at a time, and those beside them that are not quantized.

    Raises:
        UnsupportedModelError: weights are stored in a way that is not read, which is named.
    """

    def __init__(self, folder: SafetensorsFolder, config: Mapping[str, Any]) -> None:
        super().__init__(folder)
        del config  # its bits are a mean
        self._stored = frozenset(folder.tensor_names())
        modules = {name.removesuffix(_TRELLIS) for name in self._stored if name.endswith(_TRELLIS)}
        _refuse_variants(folder, modules)
        self._modules = {module + _WEIGHT: module for module in modules}
        self._parts = {module + part for module in modules for part in _PARTS}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._joined: dict[str, tuple[str, ...]] = {}
        self._workers: ThreadPoolExecutor | None = None
        self._list()

    def _list(self) -> None:
        apart = {part for parts in self._joined.values() for part in parts}
        own = self._modules.keys() | self._joined.keys() | (self._stored - self._parts)
        self._names = sorted(own - apart)

    def fit(self, wanted: Mapping[str, tuple[int, ...]]) -> None:
        """Present weights as a model has them: without padding, and joined where it joins them.

        Args:
            wanted: shapes of the model's tensors.
        """
        for name, shape in wanted.items():
            stored, found = name.rpartition(".")[0] + _WEIGHT, self._padded(name)
            if stored in self._modules and found == padded(shape):
                self._shapes[name] = shape
            elif found is None and (parts := self._parts_of(name, shape)):
                self._joined[name] = tuple(parts)
                self._shapes |= parts
        self._list()

    def _padded(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor as it is stored; None: there is none."""
        if (module := self._modules.get(name)) is not None:
            rows, columns, _ = self._checked(module)
            return TILE * columns, TILE * rows
        return self._folder.shape(name) if name in self._stored else None

    def _parts_of(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the tensors, with their shapes, that are one in the model; empty if none are."""
        module, _, kind = name.rpartition(".")
        before, _, linear = module.rpartition(".")
        parts = [f"{before}.{part}.{kind}" for part in _JOINED.get(linear, ())]
        stored = [self._padded(part) for part in parts]
        rows = [size[0] for size in stored if size is not None]
        if len(parts) == 2:  # of one height
            rows = [shape[0] // 2] * 2
        shapes = [(count, *shape[1:]) for count in rows]
        if not parts or sum(rows) != shape[0] or stored != [padded(each) for each in shapes]:
            return {}
        return dict(zip(parts, shapes, strict=True))

    def tensor_names(self) -> list[str]:
        """List every tensor; a quantized weight has its unquantized name."""
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, unpacked, and without padding once `fit` knew the model's."""
        if (parts := self._joined.get(name)) is not None:
            shapes = [self.shape(part) for part in parts]
            return sum(shape[0] for shape in shapes), *shapes[0][1:]
        if name in self._shapes:
            return self._shapes[name]
        found = self._padded(name)
        assert found is not None, name
        return found

    def packed_bits(self, name: str) -> int | None:
        """Return 8, in which weights are held; None of other tensors."""
        return None if self.group_size(name) is None else 8

    def group_size(self, name: str) -> int | None:
        """Return the inputs that share a scale; None of tensors without codes."""
        if self._joined.get(name, (name,))[0] not in self._modules:
            return None
        width = self.shape(name)[1]
        return next((size for size in _group_sizes() if width % size == 0), None)

    def notes(self) -> tuple[str, ...]:
        found = {self._checked(module)[2] // TILE for module in self._modules.values()}
        return (HELD.format(bits=" and ".join(map(str, sorted(found)))),) if found else ()

    def load(self, name: str) -> Weight:
        """Read one tensor; a quantized one in 8 bits, or in 16 if its width fits no group."""
        if (parts := self._joined.get(name)) is not None:
            loaded: list[Any] = [self.load(part) for part in parts]
            if isinstance(loaded[0], PackedWeight):
                return PackedWeight.concatenate(loaded)
            whole: Tensor = arrays.cat(loaded)
            return whole
        if name not in self._modules:
            tensor = self._folder.load(name)
            return tensor[: self._shapes[name][0]] if name in self._shapes else tensor
        group = self.group_size(name)
        return self.unpacked(name) if group is None else self._rounded(name, group)

    def unpacked(self, name: str) -> Tensor:
        """Read one tensor as it is meant, in float16 where it is quantized."""
        if (parts := self._joined.get(name)) is not None:
            whole: Tensor = arrays.cat([self.unpacked(part) for part in parts])
            return whole
        if name not in self._modules:
            tensor = self.load(name)
            assert arrays.is_array(tensor)
            return tensor
        out = np.empty(self.shape(name), dtype=np.float16)

        def take(rows: slice, columns: slice, values: NDArray[np.float32]) -> None:
            out[rows, columns] = values

        self._decode(name, take)
        found: Tensor = self._as_read(out)
        return found

    def _rounded(self, name: str, group: int) -> PackedWeight:
        count, width = self.shape(name)
        codes = np.empty((count, width), dtype=np.uint8)
        scale = np.empty((count, width // group), dtype=arrays.numpy_dtype("bfloat16"))

        def take(rows: slice, columns: slice, values: NDArray[np.float32]) -> None:
            groups = values.reshape(len(values), -1, group)
            steps = (np.abs(groups).max(-1) / 127).astype(scale.dtype)
            factors = np.where(steps == 0, 1, steps).astype(np.float32)
            found = np.rint(groups / factors[..., None]) + 128
            codes[rows, columns] = found.clip(0, 255).reshape(values.shape)
            first = columns.start // group
            scale[rows, first : first + steps.shape[1]] = factors

        self._decode(name, take)
        found_scale = self._as_read(scale)
        return PackedWeight(
            codes=self._as_read(codes),
            scale=found_scale,
            offset=-128 * found_scale,
            offset_kind=OffsetKind.ADDITIVE,
            bits=8,
            group_size=group,
        )

    def _decode(self, name: str, take: Callable[[slice, slice, NDArray[np.float32]], None]) -> None:
        """Hand over the parts of a weight in several threads: outputs, inputs, values."""
        module = self._modules[name]
        count, width = self.shape(name)
        rows, columns, words = self._checked(module)
        packed = np.asarray(self._folder.load(module + _TRELLIS).numpy()).view(np.uint16)
        inputs = self._scale(module, _SCALES[0], TILE * rows)
        outputs = self._scale(module, _SCALES[1], TILE * columns)
        table = self._codebook(module)

        def decode(place: tuple[int, int]) -> None:
            first, start = place
            last, stop = min(first + BLOCK, width), min(start + OUTPUTS_AT_ONCE, count)
            tiles = packed[
                first // TILE : (first + BLOCK) // TILE,
                start // TILE : -(-stop // BLOCK) * BLOCK // TILE,
            ]
            values = rotated_back(table[states(tiles, words // TILE)])
            values *= outputs[start : start + len(values), None]
            values *= inputs[first : first + BLOCK]
            take(slice(start, stop), slice(first, last), values[: stop - start, : last - first])

        places = product(range(0, width, BLOCK), range(0, count, OUTPUTS_AT_ONCE))
        for _ in self._threads().map(decode, places):
            pass

    def _threads(self) -> ThreadPoolExecutor:
        """Return threads that end with this reader."""
        if self._workers is None:
            self._workers = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "exl3")
        return self._workers

    def _checked(self, module: str) -> tuple[int, int, int]:
        """Return the tiles of inputs and of outputs, and the words of a tile."""
        shape = self._folder.shape(module + _TRELLIS)
        kind = self._folder.dtype(module + _TRELLIS)
        fits = (
            kind == "int16"
            and len(shape) == 3
            and all(shape)
            and not (shape[0] * TILE % BLOCK or shape[1] * TILE % BLOCK or shape[2] % TILE)
            and shape[2] // TILE in BITS
        )
        if not fits:
            raise _damaged(module, f"symbols of {kind} and shape {shape}")
        return shape[0], shape[1], shape[2]

    def _scale(self, module: str, names: tuple[str, str], size: int) -> NDArray[np.float32]:
        """Read the scales of inputs or outputs; the first files have signs alone, 1 is -1."""
        stored = next((module + name for name in names if module + name in self._stored), None)
        if stored is None:
            raise _damaged(module, f"no {names[0][1:]}")
        found = np.asarray(self._folder.load(stored).numpy()).reshape(-1)
        if stored.endswith(names[1]):
            if found.dtype != np.int16:
                raise _damaged(module, f"{names[1][1:]} of type {found.dtype}")
            bits = np.unpackbits(found.view(np.uint8), bitorder="little")
            found = 1 - 2 * bits.astype(np.float32)
        scale = found.astype(np.float32)
        if len(scale) != size or not np.isfinite(scale).all():
            raise _damaged(module, f"{len(scale)} numbers for {size}, or NaN, in {names[0][1:]}")
        return scale

    def _codebook(self, module: str) -> NDArray[np.float32]:
        for kind in _CODEBOOKS:
            if module + kind in self._stored:
                (multiplier,) = np.asarray(self._folder.load(module + kind).numpy()).reshape(-1)
                return codebook(kind, int(multiplier) & 0xFFFFFFFF)
        return codebook()

    def _as_read(self, array: NDArray[Any]) -> Any:
        found = arrays.of_numpy(array)
        return arrays.in_torch(found) if self._folder.in_torch else found


def padded(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a weight's shape as it is stored."""
    return tuple(-(-size // BLOCK) * BLOCK for size in shape)


def states(tiles: NDArray[np.uint16], bits: int) -> NDArray[Any]:
    """Return the 16 bits that end with each symbol, where its value belongs.

    Args:
        tiles: (inputs / 16, outputs / 16, 16 * bits) words.

    Returns:
        (outputs, inputs).
    """
    last, before, shift = _places(bits)
    words = tiles.astype(np.uint32)
    found = ((words[..., before] << 16 | words[..., last]) >> shift) & 0xFFFF
    across = found.reshape(*tiles.shape[:2], TILE, TILE).transpose(1, 2, 0, 3)
    gathered: NDArray[Any] = across.reshape(tiles.shape[1] * TILE, tiles.shape[0] * TILE)
    return gathered


@cache
def _places(bits: int) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.uint32]]:
    """Return the words of each weight's symbol and before it, and the bits after it, by output."""
    output, input_ = np.divmod(np.arange(TILE * TILE), TILE)
    # As the fragments of a matrix are held by the 32 lanes of a tensor core's operand.
    lane = output % 8 * 4 + input_ % 8 // 2
    symbol = lane * 8 + output // 8 * 4 + input_ // 8 * 2 + input_ % 2
    end = (symbol + 1) * bits
    last = (end - 1) // 16
    shift = (16 * (last + 1) - end).astype(np.uint32)
    return last ^ 1, (last - 1) % (16 * bits) ^ 1, shift


@cache
def codebook(kind: str = "", multiplier: int = 89226354) -> NDArray[np.float32]:
    """Return the value of each number of 16 bits, as float16 has it.

    Args:
        kind: ".mcg", ".mul1", or empty for the hash of files that name none.
        multiplier: of the number.
    """
    product = np.arange(1 << 16, dtype=np.uint32) * np.uint32(multiplier)
    if kind == ".mul1":
        total = product.view(np.uint8).reshape(-1, 4).sum(-1)
        step, shift = np.array([0x1EEE, 0xC931], dtype=np.uint16).view(np.float16).astype(float)
        sums: NDArray[np.float32] = ((1024 + total) * step + shift).astype(np.float16)
        return sums.astype(np.float32)
    if not kind:
        product += np.uint32(64248484)
    halves = (product & np.uint32(0x8FFF8FFF) ^ np.uint32(0x3B603B60)).view(np.float16)
    values: NDArray[np.float32] = (halves[::2] + halves[1::2]).astype(np.float32)
    return values


def rotated_back(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Transform (outputs, 128) along both dimensions, outputs in blocks of 128."""
    matrix = hadamard()
    blocks = (values @ matrix).reshape(-1, BLOCK, BLOCK)
    return (matrix @ blocks).reshape(values.shape)


@cache
def hadamard() -> NDArray[np.float32]:
    """Return Sylvester's matrix of 128 x 128, of norm 1."""
    found = np.ones((1, 1), dtype=np.float32)
    while len(found) < BLOCK:
        found = np.block([[found, found], [found, -found]])
    return found / np.float32(BLOCK**0.5)


def _group_sizes() -> tuple[int, ...]:
    return BLOCK, BLOCK // 2, SMALLEST_GROUP


def _refuse_variants(folder: SafetensorsFolder, modules: set[str]) -> None:
    text = folder.config.get("text_config")
    kinds = {part.get("model_type") for part in (folder.config, text) if isinstance(part, dict)}
    scaled = [module for module in modules if ".experts." in module]
    if scaled and kinds.intersection(_SCALED_EXPERTS):
        raise UnsupportedModelError(
            f"ExLlamaV3 stores the experts of this family scaled, such as {min(scaled)}, and which"
            f" of its versions did is not in the folder; {_WAY}"
        )
    sliced = [module for module in modules if ".slice." in module]
    if sliced:
        raise UnsupportedModelError(
            f"{min(sliced)} is a part of a linear that ExLlamaV3 cut, which is not read; {_WAY}"
        )
    stored = set(folder.tensor_names())
    first = [module for module in modules if f"{module}.scale" in stored]
    if first:
        raise UnsupportedModelError(
            f"{min(first)}.scale is of ExLlamaV3's first version, whose files its present one does"
            f" not read either; {_WAY}"
        )


def _damaged(module: str, found: str) -> CheckpointError:
    return CheckpointError(f"{module} has {found}, which is no weight of EXL3; fetch it again")
