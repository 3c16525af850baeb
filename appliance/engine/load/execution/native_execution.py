"""The CPU library executes the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from appliance.engine.run.host_device import NativeDevice
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.cpu.cache import bytes_per_token
from appliance.kernels.penalties import cpu as penalties_on_cpu
from appliance.kernels.sampling.cpu import NativeSampling
from appliance.kernels.token_mask.cpu import NativeMasks
from appliance.kernels.token_scores.cpu import NativeScores
from appliance.model.executor import heads_of
from appliance.model.native_loader import load_native
from appliance.model.size import estimate_native_bytes, native_slot_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from appliance.config import EngineConfig
    from appliance.engine.devices import Precision
    from appliance.engine.memory.experts.split import ExpertsOnHost
    from appliance.engine.nouns.beacon import Beacon
    from appliance.engine.packed_models import PackedModels
    from appliance.engine.ranks.ranks import Ranks
    from appliance.engine.run.device import Device
    from appliance.engine.run.sampler import SampleTokens
    from appliance.kernels.cpu.engine import NativeEngine
    from appliance.kernels.operations import MaskTokens, ScoreTokens
    from appliance.kernels.penalties.rows import Penalize
    from appliance.model.executor import Executor
    from appliance.model.fallback.operations import Operations
    from appliance.model.source import ModelSource
    from appliance.model.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class NativeExecution:
    in_library: ClassVar[bool] = True
    uses_triton: ClassVar[bool] = False
    activation_bytes: ClassVar[int] = 4  # all activations are float32

    precision: Precision
    engine: NativeEngine
    isa: str
    ranks: Ranks | None = None  # that divide the model; None: this process holds it whole
    kept: PackedModels | None = None

    @property
    def name(self) -> str:
        """Name with the instruction set in use, and the ranks."""
        ranks = "" if self.ranks is None else f", {self.ranks.division.in_words()}"
        return f"cpu library ({self.isa}){ranks}"

    def step_device(self, threads: int) -> Device:
        return NativeDevice()

    def started(self, source: ModelSource) -> NativeExecution:
        """Start the processes of other ranks, if there are any; see `start_native`."""
        if self.ranks is None:
            return self
        from appliance.engine.ranks.started import start_native  # which one process does without

        measure = partial(native_slot_bytes, source, dtype=self.precision.dtype)
        kv_bytes = replace(self, ranks=None).kv_bytes_per_token(source.spec)
        library = self.engine.library
        ranks = start_native(self.ranks, source, measure, kv_bytes, self.precision, library)
        return replace(self, ranks=ranks)

    def with_host_experts(
        self, experts: ExpertsOnHost, config: EngineConfig, threads: int
    ) -> NativeExecution:
        assert not experts.layers  # all are on the host already
        return self

    def kept_weights(self, model: Path) -> PackedModels | None:
        return None if self.kept is None else self.kept.beside(model)

    def weight_bytes(self, source: ModelSource) -> int:
        """Count packed weights by their codes, others in `dtype`, and copies in all ranks."""
        copies = (lambda slot: 1) if self.ranks is None else self.ranks.division.copies
        return estimate_native_bytes(source, self.precision.dtype, copies)

    def kv_bytes_per_token(self, spec: DecoderSpec) -> int:
        """Divide the library's page size by its tokens."""
        layers = self.precision.kv_layers
        return sum(
            bytes_per_token(self.engine.library, layer.format, heads, width)
            for part in self._parts(spec)
            for layer, (heads, width) in zip(layers, heads_of(part), strict=True)
        )

    def open_block_bytes(self, spec: DecoderSpec) -> int:
        """Count a block's tokens at 8 bits in the sealed layers."""
        layers = self.precision.kv_layers
        return self.precision.block_size * sum(
            bytes_per_token(self.engine.library, KVFormat.INT8, heads, width)
            for part in self._parts(spec)
            for layer, (heads, width) in zip(layers, heads_of(part), strict=True)
            if layer.format.is_sealed
        )

    def state_bytes(self, spec: DecoderSpec) -> int:
        return sum(part.state_bytes for part in self._parts(spec))

    def _parts(self, spec: DecoderSpec) -> tuple[DecoderSpec, ...]:
        """Return the specs of all ranks' caches."""
        return (spec,) if self.ranks is None else self.ranks.division.cached(spec)

    def load(
        self,
        source: ModelSource,
        on_progress: Callable[[str, int, int], None],
        context_length: int,
        beacon: Beacon | None = None,
    ) -> Executor[Any]:
        """Load the weights into the library's tiles, in all ranks at once."""
        if beacon is not None:
            self.engine.watch(beacon.address)
        if self.ranks is not None:
            return self.ranks.load_native(
                source, self.engine, self.precision.dtype, on_progress, context_length
            )
        return load_native(
            source,
            self.engine,
            self.precision.dtype,
            on_progress,
            context_length=context_length,
            kept=self.kept,
        )

    def operations(self) -> Operations:
        """Return the linears and attention for transformers' modules."""
        from appliance.model.fallback.operations import LibraryOperations

        return LibraryOperations(self.engine, self.precision.dtype)

    def sample_tokens(self, spec: DecoderSpec, max_rows: int) -> SampleTokens:
        return NativeSampling(self.engine)

    @property
    def penalize(self) -> Penalize:
        return penalties_on_cpu.penalize

    @property
    def mask_tokens(self) -> MaskTokens:
        return NativeMasks(self.engine.library)

    @property
    def score_tokens(self) -> ScoreTokens:
        return NativeScores(self.engine)
