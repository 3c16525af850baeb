"""Launches the FP8 matmul: lays weights out at load, quantizes activations, chooses grids."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

from appliance.errors import UnsupportedModelError
from appliance.kernels.fp8_matmul.kernel import fp8_matmul_kernel, quantize_rows_kernel
from appliance.kernels.gpu.direct_launch import Launcher, device_of
from appliance.kernels.gpu.residency import Footprints
from appliance.kernels.gpu.target import target_of
from appliance.kernels.gpu.timed import LaunchChoice, TimedChoices
from appliance.kernels.packed_matmul.launch import (
    DTYPES,
    WIDTH_MULTIPLE,
    TiledLinear,
    footprint_of,
    launch_options,
    place_of,
    workspace_of,
)
from appliance.kernels.packed_matmul.reference import DenseLinear
from appliance.kernels.packed_matmul.tiled import pad_bias, tile_fp8
from appliance.kernels.packed_matmul.tiles import (
    TILE_N,
    MatmulTile,
    architecture,
    choose_splits,
    fitting_splits,
)
from appliance.kernels.weights.fp8 import BLOCK, NAN_CODE, Fp8Weight

if TYPE_CHECKING:
    from appliance.kernels.operations import Linear


logger = logging.getLogger(__name__)

BLOCK_K = 128
QUANTIZE_BLOCK = 2048
# Up to so many rows of x our kernel multiplies, with its inputs split among programs. More rows
# fill the GPU without a split, and the library's tiles need not leave registers every 128 inputs.
MOST_OWN_ROWS = 64
LIBRARY_MULTIPLE = 16  # of inputs and outputs
_FOOTPRINTS = Footprints(fp8_matmul_kernel)
_launch_matmul = Launcher(fp8_matmul_kernel)
_launch_quantize = Launcher(quantize_rows_kernel)

LEAST_NATIVE = 89  # compute capability from which tensor cores take e4m3

# With FP8 activations nothing is widened, so tiles are chosen for reuse, and like those of
# packed_matmul from compiled code alone: computed, not timed.
_FEW = (MatmulTile(16, 16, 64, 4, 4), MatmulTile(64, 64, 64, 4, 4))
FP8_TILES = {
    89: (*_FEW, MatmulTile(1 << 30, 128, 128, 8, 3)),
    90: (*_FEW, MatmulTile(1 << 30, 128, 128, 8, 4)),
    120: (*_FEW, MatmulTile(1 << 30, 128, 128, 8, 3)),
}


def choose_fp8_tile(rows: int, capability: int) -> MatmulTile:
    """Choose the tile for a number of rows of x and a compute capability (89 is 8.9)."""
    return next(tile for tile in fp8_tiles_of(capability) if rows <= tile.max_rows)


def fp8_tiles_of(capability: int) -> tuple[MatmulTile, ...]:
    """Return the table of a compute capability, by rows of x."""
    elders = [elder for elder in FP8_TILES if elder <= capability]
    return FP8_TILES[120 if capability > 90 else max(elders, default=LEAST_NATIVE)]


class ActivationKind(Enum):
    """The type in which activations are multiplied."""

    SAME = "same"  # their own: the weight's codes are widened, on any GPU
    FP8 = "fp8"  # quantized row by row: tensor cores that take e4m3


@dataclass(frozen=True, slots=True)
class Fp8Linear:
    """x @ weight.T + bias with x quantized to e4m3, row by row."""

    weight: Fp8Weight
    bias: Tensor | None  # (out_features,) float32
    timed: TimedChoices = field(default_factory=TimedChoices, init=False, compare=False, repr=False)
    splits: dict[int, int] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes that the weight and bias take."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply.

        Args:
            x: (num_tokens, in_features) bfloat16 or float16.

        Returns:
            (num_tokens, out_features), dtype of x.
        """
        assert x.shape[1] == self.in_features, (x.shape, self.in_features)
        assert x.dtype in DTYPES, x.dtype
        num_tokens = x.shape[0]
        if not num_tokens:
            return x.new_empty(0, self.out_features)
        codes, scales = quantize_rows(x)
        most_own = MOST_OWN_ROWS if self.timed.own_rows is None else self.timed.own_rows
        if num_tokens > most_own and self.suits_library(x.dtype, x.device):
            return self._by_library(codes, scales, x.dtype)
        out = x.new_empty(num_tokens, self.out_features)
        target = target_of(x.device)
        entry = choose_fp8_tile(num_tokens, target.capability)
        choice = self.timed.entries.get(entry.max_rows, LaunchChoice())
        tile = choice.tile or entry
        workspace = workspace_of(x.device)
        fixed = fp8_constexprs(
            self.in_features,
            tile,
            blockwise=self.weight.is_blockwise,
            native=not target.is_interpreted,
        )
        arguments = (
            out,
            codes,
            scales,
            self.weight.codes.view(torch.uint8),
            self.weight.scale,
            self.bias,
            workspace.partial,
            workspace.arrived,
            num_tokens,
            self.out_features,
            self.in_features,
        )
        options = {**fixed, **launch_options(tile)}
        with device_of(x):
            splits = choice.splits
            if splits is None:
                program = footprint_of(_FOOTPRINTS, x.device, arguments, options)
                place = place_of(x.device, program)
                splits = choose_splits(*self._split_sizes, tile, place)
                self.splits[entry.max_rows] = splits
            grid = (-(-num_tokens // tile.block_m), -(-self.out_features // tile.block_n), splits)
            _launch_matmul(grid, arguments, options)
        return out

    def use(self, timed: TimedChoices) -> None:
        """Multiply by these choices from now on; what they lack is computed."""
        self.timed.take(timed)
        self.splits.clear()

    def splits_for(self, entry: MatmulTile) -> tuple[int, tuple[int, ...]]:
        """Return the splits for an entry of the table, and those that could be.

        Such a product has run before, with splits that were computed.
        """
        tile = self.timed.entries.get(entry.max_rows, LaunchChoice()).tile or entry
        return self.splits[entry.max_rows], fitting_splits(*self._split_sizes, tile)

    @property
    def _split_sizes(self) -> tuple[int, int, int]:
        """Tiles of output features, blocks of inputs, and bytes of a tile in one block."""
        tiles_n, blocks_k = -(-self.out_features // TILE_N), -(-self.in_features // BLOCK_K)
        return tiles_n, blocks_k, BLOCK_K * TILE_N

    def suits_library(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Return True if the library can multiply activations of a type by this weight."""
        return (
            dtype == torch.bfloat16
            and not self.weight.is_blockwise
            and self.out_features % LIBRARY_MULTIPLE == 0
            and library_multiplies(device)
        )

    def _by_library(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        return torch._scaled_mm(
            codes.view(torch.float8_e4m3fn),
            self.weight.codes.t(),
            scale_a=scales[:, None],
            scale_b=self.weight.scale[None, :],
            bias=None if self.bias is None else self.bias.to(dtype),
            out_dtype=dtype,
        )


@lru_cache
def library_multiplies(device: torch.device) -> bool:
    """Return True if torch multiplies e4m3 there with a scale for each row and each output.

    That depends on GPU and build, and torch does not tell; a build may even fail without an error.
    So a product whose numbers are known is tried once, with as many rows as the library gets.
    """
    random = torch.Generator().manual_seed(0)
    rows, outputs, inputs = MOST_OWN_ROWS + 16, 3 * LIBRARY_MULTIPLE, 4 * LIBRARY_MULTIPLE
    # Integers that e4m3 holds, powers of two, and sums that float32 holds: all of it is exact.
    x = torch.randint(-8, 9, (rows, inputs), generator=random).float()
    weight = torch.randint(-8, 9, (outputs, inputs), generator=random).float()
    x_scale, scale = 2.0 ** (torch.arange(rows) % 5 - 2), 2.0 ** (torch.arange(outputs) % 7 - 3)
    bias = torch.arange(outputs) - 20.0
    product = (x @ weight.t()) * x_scale[:, None] * scale
    try:
        found = torch._scaled_mm(
            x.to(device, torch.float8_e4m3fn),
            weight.to(device, torch.float8_e4m3fn).t(),
            scale_a=x_scale[:, None].to(device),
            scale_b=scale[None].to(device),
            bias=bias.to(device, torch.bfloat16),
            out_dtype=torch.bfloat16,
        )
    except (RuntimeError, ValueError) as error:
        logger.info("FP8 products of many rows stay with our kernel: %s", error)
        return False
    is_near = (found.cpu() - product - bias).abs() <= 2**-7 * (product.abs() + bias.abs())
    if wrong := int((~is_near).sum()):  # NaN is not near
        logger.warning(
            "FP8 products of many rows stay with our kernel: torch's are wrong on this GPU (%d of"
            " %d numbers of a test)",
            wrong,
            is_near.numel(),
        )
    return not wrong


def prepare_linear(
    weight: Fp8Weight,
    bias: Tensor | None,
    dtype: torch.dtype,
    activations: ActivationKind | None = None,
) -> Linear:
    """Lay an FP8 weight out for the GPU kernels.

    Args:
        weight: per-channel or blockwise.
        bias: (out_features,) or None.
        dtype: of activations; float32, for checks, makes the weight dense.
        activations: type to multiply them in; None takes the checkpoint's, if the GPU has it.

    Raises:
        UnsupportedModelError: no kernel covers shape, dtype or GPU, or a code is NaN.
    """
    if dtype == torch.float32:
        return DenseLinear(weight.dequantize(), None if bias is None else bias.float())
    if activations is None:
        activations = _preferred(weight)
    _check_supported(weight, dtype, activations)
    workspace_of(weight.codes.device)
    if activations is ActivationKind.FP8:
        library_multiplies(weight.codes.device)  # tried now, not while serving
        scale, codes = weight.scale.contiguous(), weight.codes.contiguous()
        return Fp8Linear(Fp8Weight(codes, scale), None if bias is None else bias.float())
    scale = weight.row_scales() if weight.is_blockwise else weight.scale
    group_size = BLOCK if weight.is_blockwise else 0
    tiled = tile_fp8(weight.codes.view(torch.uint8), scale, group_size)
    return TiledLinear(tiled, pad_bias(bias), activation=None)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `reference.quantize_rows`, with the codes as uint8."""
    if x.stride(1) != 1 or x.stride(0) % 16:
        x = x.contiguous()
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    if len(x):
        arguments = codes, scales, x, x.shape[1], x.stride(0)
        with device_of(x):
            _launch_quantize((len(x),), arguments, {"BLOCK": QUANTIZE_BLOCK, "num_warps": 4})
    return codes, scales


def _preferred(weight: Fp8Weight) -> ActivationKind:
    target = target_of(weight.codes.device)
    native = not target.is_interpreted and target.capability >= LEAST_NATIVE
    return ActivationKind.FP8 if native and weight.quantized_inputs else ActivationKind.SAME


def _check_supported(weight: Fp8Weight, dtype: torch.dtype, activations: ActivationKind) -> None:
    target = target_of(weight.codes.device)
    capability = target.capability
    native = activations is ActivationKind.FP8 and not target.is_interpreted
    if architecture(capability) is None or (native and capability < LEAST_NATIVE):
        what = f"compute capability {capability / 10} with activations {activations.value!r}"
        supported = "8.0 and above with 'same', 8.9 and above with 'fp8'"
    elif dtype not in DTYPES:
        what, supported = f"activation dtype {dtype}", ", ".join(map(str, DTYPES))
    elif weight.shape[1] % WIDTH_MULTIPLE:
        what, supported = f"{weight.shape[1]} inputs", f"multiples of {WIDTH_MULTIPLE}"
    elif weight.is_blockwise and weight.shape[1] % BLOCK:
        what, supported = f"{weight.shape[1]} inputs in blocks", f"multiples of {BLOCK}"
    elif bool(((weight.codes.view(torch.uint8) & NAN_CODE) == NAN_CODE).any()):
        what, supported = "a code that is NaN", "finite weights"
    else:
        return
    shape = f"an FP8 weight of {weight.shape[0]} x {weight.shape[1]}"
    msg = f"the FP8 matmul on the GPU has no kernel for {what} ({shape}); supported: {supported}"
    raise UnsupportedModelError(msg)


class Fp8Constexprs(TypedDict):
    """The compile-time arguments of `fp8_matmul_kernel`."""

    BLOCKWISE: bool
    EVEN_K: bool
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    STAGES: int
    NATIVE: bool


def fp8_constexprs(
    in_features: int, tile: MatmulTile, *, blockwise: bool, native: bool
) -> Fp8Constexprs:
    """Return the compile-time arguments of `fp8_matmul_kernel`."""
    return {
        "BLOCKWISE": blockwise,
        "EVEN_K": in_features % BLOCK_K == 0,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": BLOCK_K,
        "STAGES": tile.num_stages,
        "NATIVE": native,
    }
