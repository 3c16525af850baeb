"""Latent attention on the CPU in torch: the reference, on the step that torch's attention plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.kernels.attention.cpu_plan import CpuAttentionWork
from appliance.kernels.latent_attention import reference

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.cache.decoder_cache import AnyLayerCache


def attend_latents(
    query: Tensor, cache: AnyLayerCache, work: object, *, scale: float, latent: int
) -> Tensor:
    """Attend; see `reference.attend_latents`, with the work from `cpu_plan.plan_attention`."""
    assert isinstance(work, CpuAttentionWork)
    return reference.attend_latents(query, cache, work.batch, scale=scale, latent=latent)
