"""Runs a vision tower's layers in torch: on a GPU, and on a CPU without the C library."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch

from appliance.kernels.backend import select_backend
from appliance.kernels.cache.decoder_cache import KVCache
from appliance.kernels.rows.ragged import GivenRows, RaggedBatch
from appliance.model.encoder.decoder_loader import StepKeys, without_cache
from appliance.model.encoder.encoder import BiasedLinear
from appliance.model.loader import load_decoder
from appliance.model.vision.clipping import read_bounds
from appliance.model.vision.tower import make_tower

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from appliance.kernels.cache.kv_cache import LayerCache
    from appliance.model.decoder import Decoder
    from appliance.model.vision.source import TowerSource
    from appliance.model.vision.tower import Tower


@dataclass(frozen=True, slots=True)
class TorchLayers:
    """A run of a tower's layers in torch; see `tower.Layers`.

    Attributes:
        norms: the last norm follows.
    """

    decoder: Decoder
    norms: bool

    @torch.inference_mode()
    def __call__(
        self, stream: Tensor, axes: NDArray[np.int64], lengths: Sequence[int], taps: Sequence[int]
    ) -> tuple[Any, Any | None]:
        device, count = self.decoder.device, len(stream)
        starts = [sum(lengths[:place]) for place in range(len(lengths))]
        tables = [range(start, start + n) for start, n in zip(starts, lengths, strict=True)]
        batch = RaggedBatch.of(lengths, lengths, tables, block_size=1, device=device)
        rows = torch.arange(count, dtype=torch.int32, device=device)
        turned = torch.from_numpy(axes).to(device)
        batch = replace(batch, given=GivenRows(rows, stream), axes=turned)
        mixer = next(iter(self.decoder.spec.attention_layers.values()))
        kept = cast("LayerCache", StepKeys(mixer.num_kv_heads))
        cache = KVCache((kept,) * len(self.decoder.spec.layers))
        ids = torch.zeros(count, dtype=torch.int64, device=device)
        tapped: list[Tensor] = []
        hidden = passing = stream
        for index, after in enumerate(self.decoder.after_each_layer(ids, ids, batch, cache)):
            hidden, passing = after
            tapped += [passing.float()] if index in taps else []
        found = hidden if self.norms else passing
        return found.float(), torch.stack(tapped, 1) if tapped else None


def load_torch_tower(
    source: TowerSource,
    device: torch.device,
    dtype: torch.dtype,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> Tower:
    """Read a tower's weights in torch; arguments and errors as for `load_native_tower`.

    Args:
        source: opened in torch.
        dtype: of weights and activations of the layers; what is around them is float32.
    """
    if not source.spec.layers.layers:
        return make_tower(replace(source, device=device), (), BiasedLinear)
    backend = without_cache(select_backend(device), looks_ahead=True)
    clips = read_bounds(source)
    if clips:  # between gate and activation
        backend = replace(backend, prepare_gated=lambda *_: None)
    decoder = load_decoder(source.layers, backend, device, dtype, on_progress)
    if clips:
        clipping = zip(clips, decoder.layers, strict=True)
        decoder = replace(decoder, layers=tuple(own.around(layer) for own, layer in clipping))

    bounds = (*(first for first, _ in source.spec.runs), len(decoder.layers))
    runs = [
        TorchLayers(_part(decoder, first, last), source.spec.last_norm and last == bounds[-1])
        for first, last in pairwise(bounds)
    ]
    return make_tower(replace(source, device=device), runs, BiasedLinear)


def _part(decoder: Decoder, first: int, last: int) -> Decoder:
    """Return a run of a decoder's layers."""
    norm = decoder.layers[first - 1].next_norm if first else decoder.first_norm
    return replace(decoder, layers=decoder.layers[first:last], first_norm=norm)
