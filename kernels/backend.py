"""Which implementation of each operation runs where: one frozen table of functions per backend.

Every entry has a torch reference that is slow and obviously right; the other tables replace
entries of it. Choosing is explicit, by device, and never falls back in silence.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from appliance.kernels.gated_activation import cpu as cpu_activation
from appliance.kernels.gated_activation import reference as reference_activation
from appliance.kernels.kv_write import reference as reference_kv_write
from appliance.kernels.norm_rope import cpu as cpu_norm_rope
from appliance.kernels.norm_rope import reference as reference_norm_rope
from appliance.kernels.packed_matmul import cpu as cpu_matmul
from appliance.kernels.packed_matmul import reference as reference_matmul
from appliance.kernels.paged_attention import cpu as cpu_attention
from appliance.kernels.paged_attention import reference as reference_attention

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from appliance.kernels.activation import Activation
    from appliance.kernels.kv_cache import KVBlocks
    from appliance.kernels.packed import PackedWeight
    from appliance.kernels.ragged import RaggedBatch

logger = logging.getLogger(__name__)


class Linear(Protocol):
    """A weight laid out for one backend: x (num_tokens, in) -> (num_tokens, out), dtype of x."""

    @property
    def in_features(self) -> int:
        """Width of x."""
        ...

    @property
    def out_features(self) -> int:
        """Width of the result."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes that the weight and bias take."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply: (num_tokens, in_features) -> (num_tokens, out_features)."""
        ...


class PagedAttention(Protocol):
    """Attention of every row over its own sequence's blocks."""

    def __call__(
        self,
        query: Tensor,  # (num_tokens, num_heads, head_dim)
        cache: KVBlocks,  # this step's keys and values are already written
        work: object,  # what this backend's plan_attention returned for the step
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:  # (num_tokens, num_heads, head_dim), dtype of query
        """Attend; the arguments are described at `paged_attention.reference`."""
        ...


@dataclass(frozen=True, slots=True)
class Backend:
    """The operations a decoder step is made of."""

    name: str
    # weight (out, in) dense or packed, bias (out,) or None, activation dtype -> Linear
    prepare_linear: Callable[[Tensor | PackedWeight, Tensor | None, torch.dtype], Linear]
    # x (num_tokens, dim), weight (dim,) float32, eps -> (num_tokens, dim)
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    # x, residual, weight, eps -> (rms_norm(x + residual), x + residual)
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    # x (num_tokens, heads, head_dim), cos and sin (num_tokens, rotary_dim / 2) float32 -> like x
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor]
    # gate and up side by side (num_tokens, 2 * intermediate) -> (num_tokens, intermediate)
    gated_activation: Callable[[Tensor, Activation], Tensor]
    # key, value (num_tokens, num_kv_heads, head_dim), cache, slot_mapping (num_tokens,)
    write_kv: Callable[[Tensor, Tensor, KVBlocks, Tensor], None]
    # once per step, shared by all layers; the second argument is the block size
    plan_attention: Callable[[RaggedBatch, int], object]
    paged_attention: PagedAttention


REFERENCE = Backend(
    name="reference",
    prepare_linear=reference_matmul.prepare_linear,
    rms_norm=reference_norm_rope.rms_norm,
    add_rms_norm=reference_norm_rope.add_rms_norm,
    rotary=reference_norm_rope.rotary,
    gated_activation=reference_activation.gated_activation,
    write_kv=reference_kv_write.write_kv,
    plan_attention=reference_attention.plan_attention,
    paged_attention=reference_attention.paged_attention,
)

# The reference KV write is a handful of torch calls: nothing faster was found in torch.
CPU = replace(
    REFERENCE,
    name="cpu",
    prepare_linear=cpu_matmul.prepare_linear,
    rms_norm=cpu_norm_rope.rms_norm,
    add_rms_norm=cpu_norm_rope.add_rms_norm,
    rotary=cpu_norm_rope.rotary,
    gated_activation=cpu_activation.gated_activation,
    plan_attention=cpu_attention.plan_attention,
    paged_attention=cpu_attention.paged_attention,
)


def select_backend(device: torch.device, choice: str = "auto") -> Backend:
    """Choose the operations for a device.

    Args:
        device: where the weights, the cache and the activations are.
        choice: "auto" takes the fastest there is for the device, "reference" the plain torch
            functions, which run anywhere.

    Raises:
        ValueError: there is no such choice, or nothing for such a device.
    """
    if choice == "reference":
        return REFERENCE
    if choice == "auto" and device.type == "cpu":
        return CPU
    if choice == "auto" and device.type == "cuda":
        return _triton()
    msg = (
        f"no kernels for device {device} with choice {choice!r}: "
        "'auto' serves cpu and cuda devices, 'reference' any device"
    )
    raise ValueError(msg)


def _triton() -> Backend:
    """Paged attention and KV write in Triton, imported here: a box with no GPU never pays for it.

    A packed weight becomes dense in the activation dtype, so it takes four times the memory of
    its 4-bit codes; the remaining entries are the reference on the device.
    """
    from appliance.kernels.kv_write.launch import write_kv
    from appliance.kernels.paged_attention.launch import paged_attention, plan_attention

    logger.warning("on CUDA, packed weights are served as dense weights in the activation dtype")
    return replace(
        REFERENCE,
        name="triton",
        prepare_linear=reference_matmul.dense_linear,
        write_kv=write_kv,
        plan_attention=plan_attention,
        paged_attention=paged_attention,
    )
