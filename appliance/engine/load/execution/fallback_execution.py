"""Transformers' modules execute the model, with another execution's linears and attention."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, cast

from appliance.engine.load.execution.torch_execution import TorchExecution, torch_step_device
from appliance.model.fallback.loader import load_fallback
from appliance.model.fallback.matrices import one_by_one

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from appliance.config import EngineConfig
    from appliance.engine.devices import Precision
    from appliance.engine.load.execution.native_execution import NativeExecution
    from appliance.engine.memory.experts.split import ExpertsOnHost
    from appliance.engine.nouns.beacon import Beacon
    from appliance.engine.run.device import Device
    from appliance.engine.run.sampler import SampleTokens
    from appliance.kernels.operations import MaskTokens, ScoreTokens
    from appliance.kernels.penalties.rows import Penalize
    from appliance.model.executor import Executor
    from appliance.model.source import ModelSource
    from appliance.model.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class FallbackExecution:
    """Wraps the execution that holds weights and cache, and samples."""

    in_library: ClassVar[bool] = False

    inner: NativeExecution | TorchExecution

    @property
    def precision(self) -> Precision:
        return self.inner.precision

    @property
    def name(self) -> str:
        return f"transformers on {self.inner.name}"

    @property
    def ranks(self) -> None:
        return None

    @property
    def uses_triton(self) -> bool:
        return self.inner.uses_triton

    @property
    def activation_bytes(self) -> int:
        return self.inner.activation_bytes

    def step_device(self, threads: int) -> Device:
        """Return the GPU, or the host: modules of transformers are torch's in any case."""
        return torch_step_device(cast("torch.device", self.precision.device), threads)

    def started(self, source: ModelSource) -> FallbackExecution:
        """Start nothing: one process has all of the model."""
        return self

    def with_host_experts(
        self, experts: ExpertsOnHost, config: EngineConfig, threads: int
    ) -> FallbackExecution:
        assert not experts.layers
        return self

    def kept_weights(self, model: Path) -> None:
        return None

    def weight_bytes(self, source: ModelSource) -> int:
        """Count linears as the inner execution does, other matrices as activations."""
        source = one_by_one(source)  # a stack of matrices counts as they do
        assert source.fallback is not None
        wider = self.activation_bytes - int(self.precision.dtype.itemsize)
        between = source.fallback.between
        counts = (prod(slot.shape) for slot in source.slots() if slot.name in between)
        return self.inner.weight_bytes(source) + wider * sum(counts)

    def kv_bytes_per_token(self, spec: DecoderSpec) -> int:
        """Return what a token adds to a sequence's own cache, where it has one."""
        if spec.own_cache is None:
            return self.inner.kv_bytes_per_token(spec)
        return spec.own_cache.sizes(self.activation_bytes).token_bytes

    def open_block_bytes(self, spec: DecoderSpec) -> int:
        return self.inner.open_block_bytes(spec)

    def state_bytes(self, spec: DecoderSpec) -> int:
        """Return what a sequence's own cache takes whatever its length, where it has one."""
        if spec.own_cache is None:
            return self.inner.state_bytes(spec)
        return spec.own_cache.sizes(self.activation_bytes).fixed_bytes

    def load(
        self,
        source: ModelSource,
        on_progress: Callable[[str, int, int], None],
        context_length: int,
        beacon: Beacon | None = None,
    ) -> Executor[Any]:
        advance = (lambda: None) if beacon is None else beacon.advance
        dtype = cast("torch.dtype", self.precision.dtype)
        return load_fallback(source, self.inner.operations(), dtype, on_progress, advance)

    def sample_tokens(self, spec: DecoderSpec, max_rows: int) -> SampleTokens:
        return self.inner.sample_tokens(spec, max_rows)

    @property
    def penalize(self) -> Penalize:
        return self.inner.penalize

    @property
    def mask_tokens(self) -> MaskTokens:
        return self.inner.mask_tokens

    @property
    def score_tokens(self) -> ScoreTokens:
        return self.inner.score_tokens
