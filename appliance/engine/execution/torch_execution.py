"""Torch executes the model, with the kernels of one backend."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from appliance.kernels.kv_cache import KVPages
from appliance.kernels.kv_format import KVFormat
from appliance.kernels.penalties import cpu as penalties_on_cpu
from appliance.kernels.sampling import batched
from appliance.kernels.token_mask import reference as masks_by_torch
from appliance.kernels.token_scores import reference as scores_by_torch
from appliance.model.executor import heads_of
from appliance.model.host_experts import HostSide
from appliance.model.loader import load_decoder
from appliance.model.size import estimate_weight_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from appliance.engine.beacon import Beacon
    from appliance.engine.execution.execution import Precision
    from appliance.engine.run.sampler import SampleTokens
    from appliance.kernels.backend import Backend
    from appliance.kernels.cpu.engine import NativeEngine
    from appliance.kernels.penalties.rows import Penalize
    from appliance.kernels.token_mask.interface import MaskTokens
    from appliance.kernels.token_scores.interface import ScoreTokens
    from appliance.model.executor import Executor
    from appliance.model.source import ModelSource
    from appliance.model.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class HostPart:
    """The layers whose experts the CPU library multiplies, and its threads."""

    layers: tuple[int, ...]
    engine: NativeEngine
    isa: str


@dataclass(frozen=True, slots=True)
class TorchExecution:
    """The torch decoder with one backend's kernels."""

    precision: Precision
    backend: Backend
    host: HostPart | None = None

    @property
    def _device(self) -> torch.device:
        return cast("torch.device", self.precision.device)

    @property
    def name(self) -> str:
        if self.host is None:
            return self.backend.name
        count = len(self.host.layers)
        return f"{self.backend.name}, cpu library ({self.host.isa}) for experts of {count} layers"

    @property
    def uses_triton(self) -> bool:
        return self.backend.name == "triton"

    @property
    def activation_bytes(self) -> int:
        return int(self.precision.dtype.itemsize)

    def weight_bytes(self, source: ModelSource) -> int:
        """Estimate the weights in the backend's layout."""
        return estimate_weight_bytes(source, self._device, self.precision.dtype)

    def kv_bytes_per_token(self, spec: DecoderSpec) -> int:
        layers = self.precision.kv_of(len(spec.cache_layers))
        return sum(
            KVPages.bytes_per_token(layer.format, *heads)
            if self.uses_triton or not layer.format.has_elements
            else layer.format.bytes_per_token(*heads)
            for layer, heads in zip(layers, heads_of(spec), strict=True)
        )

    def open_block_bytes(self, spec: DecoderSpec) -> int:
        """Count a block's tokens at 8 bits in the sealed layers."""
        layers = self.precision.kv_of(len(spec.cache_layers))
        return self.precision.block_size * sum(
            KVPages.bytes_per_token(KVFormat.INT8, *heads)
            for layer, heads in zip(layers, heads_of(spec), strict=True)
            if layer.format.is_sealed
        )

    def load(
        self,
        source: ModelSource,
        on_progress: Callable[[str, int, int], None],
        context_length: int,
        beacon: Beacon | None = None,
    ) -> Executor[Any]:
        """Load the weights in the backend's layout, and the host's experts in the library's."""
        host = None
        if self.host is not None:
            host = HostSide(self.host.engine, self._device, self.precision.dtype)
            if beacon is not None:
                self.host.engine.watch(beacon.address)
        decoder = load_decoder(
            source,
            self.backend,
            self._device,
            self.precision.dtype,
            on_progress,
            context_length=context_length,
            host=host,
            host_layers=() if self.host is None else self.host.layers,
        )
        return decoder if beacon is None else replace(decoder, on_layer=beacon.advance)

    def sample_tokens(self, spec: DecoderSpec, max_rows: int) -> SampleTokens:
        """Return Triton's sampling, or torch's.

        Raises:
            UnsupportedModelError: no kernel supports the vocabulary size.
        """
        if not self.uses_triton:
            return batched.choose
        from appliance.kernels.sampling.launch import DeviceSampling

        return DeviceSampling(max_rows, spec.vocab_size, self._device)

    @property
    def penalize(self) -> Penalize:
        if not self.uses_triton:
            return penalties_on_cpu.penalize
        from appliance.kernels.penalties.launch import penalize

        return penalize

    @property
    def mask_tokens(self) -> MaskTokens:
        if not self.uses_triton:
            return masks_by_torch.mask_tokens
        from appliance.kernels.token_mask.launch import mask_tokens

        return mask_tokens

    @property
    def score_tokens(self) -> ScoreTokens:
        return scores_by_torch.score_tokens
