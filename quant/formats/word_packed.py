"""Reads AWQ and GPTQ folders: codes in int32 words, one tensor per part.

A linear module M is stored as M.qweight, M.qzeros, M.scales and more; readers ask for its weight by
the unquantized name M.weight.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from appliance.errors import CheckpointError
from appliance.kernels import arrays
from appliance.quant.formats.dense import DenseWeights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from appliance.kernels.weights.packed import PackedWeight
    from appliance.model_files.checkpoint import SafetensorsFolder

WEIGHT, QWEIGHT, QZEROS, SCALES, G_IDX = ".weight", ".qweight", ".qzeros", ".scales", ".g_idx"
# .wf and .wf_unsqueeze_... are shifts that some versions of AutoGPTQ store beside the words.
PARTS = (QWEIGHT, QZEROS, SCALES, G_IDX, ".wf", ".wf_unsqueeze_zero", ".wf_unsqueeze_neg_one")
SCALE_DTYPES = ("float16", "bfloat16", "float32")
INDEX_DTYPES = ("int32", "int64")

Layout = dict[str, tuple[str, tuple[int, ...]]]  # type and shape of each part


class WordLayout(Protocol):
    """Layout of a weight's stored parts."""

    @property
    def bits(self) -> int:
        """Bits of a stored code."""
        ...

    @property
    def code_bits(self) -> int:
        """Bits of a code in a `PackedWeight`."""
        ...

    def fitted(self, parts: Mapping[str, tuple[int, ...]]) -> WordLayout:
        """Return the layout of a module whose parts have these shapes."""
        ...

    def shape(self, words: tuple[int, ...]) -> tuple[int, int]:
        """Return (out_features, in_features) of a weight from the shape of its qweight."""
        ...

    def layout(self, shape: tuple[int, int]) -> Layout:
        """Return the type and shape of each part; scales may have another type."""
        ...

    def decode(self, name: str, parts: Mapping[str, Tensor]) -> PackedWeight:
        """Build a weight from checked parts; `name` is for errors."""
        ...


class WordPackedWeights(DenseWeights):
    """Reads a folder of word-packed weights, one tensor at a time.

    A module without a qweight is dense, whatever the config says.
    """

    def __init__(self, folder: SafetensorsFolder, words: WordLayout) -> None:
        super().__init__(folder)
        self._words = words
        self._stored = frozenset(folder.tensor_names())
        self._modules = {
            name.removesuffix(QWEIGHT) for name in self._stored if name.endswith(QWEIGHT)
        }
        parts = {module + part for module in self._modules for part in PARTS}
        packed = {module + WEIGHT for module in self._modules}
        self._names = sorted(packed | (self._stored - parts))

    def tensor_names(self) -> list[str]:
        """List every tensor; a packed weight has its unquantized name."""
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, unpacked."""
        module = self._module(name)
        if module is None:
            return self._folder.shape(name)
        words = self._folder.shape(module + QWEIGHT)
        if len(words) != 2 or min(words) < 1:
            raise CheckpointError(
                f"{module}{QWEIGHT} has shape {words}, which is no matrix; "
                "download or quantize the model again"
            )
        return self._layout(module).shape(words)

    def packed_bits(self, name: str) -> int | None:
        """Return the bits of a packed weight's codes; None for a dense tensor.

        The CPU library holds codes of 2 and 3 bits in as many; between 4 and 8 they take 8.
        """
        module = self._module(name)
        if module is None:
            return None
        words = self._layout(module)
        return min(words.bits, 4) if words.code_bits == 4 else 8

    def group_size(self, name: str) -> int | None:
        """Return the inputs that share a scale, from the shapes that were found."""
        module = self._module(name)
        if module is None:
            return None
        out_features, in_features = self.shape(name)
        _, scales = self._layout(module).layout((out_features, in_features))[SCALES]
        return in_features * out_features // math.prod(scales)

    def load(self, name: str) -> Tensor | PackedWeight:
        """Read one tensor; codes, scales and zero points are not changed."""
        module = self._module(name)
        if module is None:
            return self._folder.load(name)
        out_features, in_features = self.shape(name)
        words = self._layout(module)
        layout = words.layout((out_features, in_features))
        parts = {part: self._part(module + part, *expected) for part, expected in layout.items()}
        if not arrays.is_finite(parts[SCALES]):
            raise CheckpointError(f"{module}{SCALES} holds NaN or infinity; quantize again")
        g_idx = module + G_IDX
        if g_idx in self._stored and self._folder.shape(g_idx) != (0,):
            kind = self._folder.dtype(g_idx)
            parts[G_IDX] = self._part(
                g_idx, kind if kind in INDEX_DTYPES else "int32", (in_features,)
            )
        return words.decode(module, parts)

    def _layout(self, module: str) -> WordLayout:
        names = {part: module + part for part in (QWEIGHT, QZEROS, SCALES)}
        return self._words.fitted(
            {part: self._folder.shape(name) for part, name in names.items() if name in self._stored}
        )

    def _module(self, name: str) -> str | None:
        module = name.removesuffix(WEIGHT)
        return module if module != name and module in self._modules else None

    def _part(self, name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._stored:
            raise CheckpointError(f"{name} is missing; download or quantize the model again")
        found = self._folder.dtype(name), self._folder.shape(name)
        right = found[0] == dtype or (name.endswith(SCALES) and found[0] in SCALE_DTYPES)
        if not right or found[1] != shape:
            raise CheckpointError(
                f"{name} is {found[0]} of shape {found[1]}, but config.json and its neighbours ask"
                f" for {dtype} of {shape}; download or quantize the model again"
            )
        return self._folder.load(name)
