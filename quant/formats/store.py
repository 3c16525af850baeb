"""How quantized weights become tensors of a folder: one protocol for all formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from appliance.quant.formats import compressed_tensors
from appliance.quant.formats.compressed_tensors_config import quantization_config

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor

    from appliance.kernels.fp8 import Fp8Weight
    from appliance.kernels.packed import PackedWeight
    from appliance.quant.formats.scheme import LinearScheme


class WeightStore(Protocol):
    """One format."""

    def layout(
        self, name: str, shape: tuple[int, int], scheme: LinearScheme, dtype: torch.dtype
    ) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Type and shape of every tensor that `encode` makes of a weight, before there is one.

        Args:
            name: of the weight, such as model.layers.0.self_attn.q_proj.weight.
            shape: (out_features, in_features).
            scheme: what it is going to be.
            dtype: of scales, where the format leaves that open.
        """
        ...

    def encode(
        self, name: str, weight: PackedWeight | Fp8Weight, scheme: LinearScheme
    ) -> dict[str, Tensor]:
        """The tensors that store one weight.

        Raises:
            QuantizeError: the format cannot hold one of its scales.
        """
        ...

    def config(
        self, schemes: Mapping[str, LinearScheme], kept: Sequence[str], *, named: bool
    ) -> dict[str, Any]:
        """The `quantization_config` of config.json.

        Args:
            schemes: of every quantized module, by its name.
            kept: linear modules that are not quantized.
            named: whether to list the quantized modules, as not all of them are linears.
        """
        ...


@dataclass(frozen=True, slots=True)
class CompressedTensorsStore:
    """The format that holds everything."""

    def layout(
        self, name: str, shape: tuple[int, int], scheme: LinearScheme, dtype: torch.dtype
    ) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """See `WeightStore`."""
        return compressed_tensors.encoded_layout(name, shape, scheme, dtype)

    def encode(
        self, name: str, weight: PackedWeight | Fp8Weight, scheme: LinearScheme
    ) -> dict[str, Tensor]:
        """See `WeightStore`."""
        return compressed_tensors.encode(name, weight, scheme)

    def config(
        self, schemes: Mapping[str, LinearScheme], kept: Sequence[str], *, named: bool
    ) -> dict[str, Any]:
        """See `WeightStore`."""
        return quantization_config(schemes, kept, named=named)
