"""Torch executes the model, with the kernels of one backend."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

from appliance.engine.devices import native_engine
from appliance.engine.run.host_device import HostDevice
from appliance.errors import ConfigError
from appliance.kernels.cache.kv_cache import KVPages
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.sampling import batched
from appliance.model.executor import heads_of
from appliance.model.host_experts import HostSide
from appliance.model.loader import load_decoder
from appliance.model.prompt_layers import PromptLayers
from appliance.model.shard.shard import Shard, portion
from appliance.model.size import estimate_weight_bytes, slot_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    import torch

    from appliance.config import EngineConfig
    from appliance.engine.devices import Precision
    from appliance.engine.memory.experts.split import ExpertsOnHost
    from appliance.engine.nouns.beacon import Beacon
    from appliance.engine.ranks.ranks import Ranks
    from appliance.engine.run.device import Device
    from appliance.engine.run.sampler import SampleTokens
    from appliance.kernels.cpu.engine import NativeEngine
    from appliance.kernels.operations import Backend, MaskTokens, ScoreTokens
    from appliance.kernels.penalties.rows import Penalize
    from appliance.model.decoder import Decoder
    from appliance.model.executor import Executor
    from appliance.model.fallback.operations import Operations
    from appliance.model.shard.joint import JoinedShard
    from appliance.model.source import ModelSource
    from appliance.model.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class HostPart:
    """The experts that the CPU library multiplies, and its threads."""

    experts: ExpertsOnHost
    engine: NativeEngine
    isa: str


@dataclass(frozen=True, slots=True)
class TorchExecution:
    """The torch decoder with one backend's kernels."""

    in_library: ClassVar[bool] = False

    precision: Precision
    backend: Backend
    host: HostPart | None = None
    ranks: Ranks | None = None  # that divide the model; None: this process has all of it
    rounds_prompts: bool = False  # to int8, see `PromptLayers`

    @property
    def _device(self) -> torch.device:
        return cast("torch.device", self.precision.device)

    @property
    def name(self) -> str:
        if self.ranks is not None:
            return f"{self.backend.name}, {self.ranks.division.in_words()}"
        name = self.backend.name + ", prompts in int8" * self.rounds_prompts
        if self.host is None:
            return name
        count = len(self.host.experts.layers)
        return f"{name}, cpu library ({self.host.isa}) for experts of {count} layers"

    @property
    def uses_triton(self) -> bool:
        return self.backend.name == "triton"

    @property
    def activation_bytes(self) -> int:
        return int(self.precision.dtype.itemsize)

    def step_device(self, threads: int) -> Device:
        return torch_step_device(self._device, threads)

    def started(self, source: ModelSource) -> TorchExecution:
        """Start the processes of other ranks, if there are any; see `start_torch`."""
        if self.ranks is None:
            return self
        from appliance.engine.ranks.started import start_torch  # which one process does without

        device, dtype = self._device, self.precision.dtype
        measure = partial(slot_bytes, source, device=device, dtype=dtype)
        kv_bytes = self.kv_bytes_of(source.spec)
        ranks = start_torch(self.ranks, source, measure, kv_bytes, device, dtype)
        return replace(self, ranks=ranks)

    def with_host_experts(
        self, experts: ExpertsOnHost, config: EngineConfig, threads: int
    ) -> TorchExecution:
        """Start the CPU library for experts in host memory."""
        if not experts.layers:
            return self
        engine, isa = native_engine(config, threads)
        return replace(self, host=HostPart(experts, engine, isa.name))

    def kept_weights(self, model: Path) -> None:
        return None

    def weight_bytes(self, source: ModelSource) -> int:
        """Estimate the weights in the backend's layout: of all ranks, or of the fullest GPU."""
        device, dtype = self._device, self.precision.dtype
        if self.ranks is None:
            return estimate_weight_bytes(source, device, dtype)
        return self._of_ranks(
            estimate_weight_bytes(source, device, dtype, copies=partial(portion, part))
            for part in self.ranks.division.parts
            if isinstance(part, Shard)
        )

    def kv_bytes_per_token(self, spec: DecoderSpec) -> int:
        """Count what all ranks keep of a token, or the GPU that keeps most."""
        return self._of_ranks(map(self.kv_bytes_of, self._parts(spec)))

    def kv_bytes_of(self, spec: DecoderSpec) -> int:
        """Count what one device keeps of a token, with these heads."""
        layers = self.precision.kv_layers
        return sum(
            KVPages.bytes_per_token(layer.format, *heads)
            if self.uses_triton or not layer.format.has_elements
            else layer.format.bytes_per_token(*heads)
            for layer, heads in zip(layers, heads_of(spec), strict=True)
        )

    def open_block_bytes(self, spec: DecoderSpec) -> int:
        """Count a block's tokens at 8 bits in the sealed layers; see `kv_bytes_per_token`."""
        return self._of_ranks(map(self.open_bytes_of, self._parts(spec)))

    def open_bytes_of(self, spec: DecoderSpec) -> int:
        """Count one device's, with these heads."""
        layers = self.precision.kv_layers
        return self.precision.block_size * sum(
            KVPages.bytes_per_token(KVFormat.INT8, *heads)
            for layer, heads in zip(layers, heads_of(spec), strict=True)
            if layer.format.is_sealed
        )

    def _parts(self, spec: DecoderSpec) -> tuple[DecoderSpec, ...]:
        return (spec,) if self.ranks is None else self.ranks.division.cached(spec)

    def _of_ranks(self, each: Iterable[int]) -> int:
        """Add up what lies in one host's memory; of GPUs, each has its own, count the fullest."""
        return sum(each) if self._device.type == "cpu" else max(each)

    def state_bytes(self, spec: DecoderSpec) -> int:
        """Count what all ranks keep of a sequence, or the GPU that keeps most."""
        return self._of_ranks(part.state_bytes for part in self._parts(spec))

    def load(
        self,
        source: ModelSource,
        on_progress: Callable[[str, int, int], None],
        context_length: int,
        beacon: Beacon | None = None,
    ) -> Executor[Any]:
        """Load the weights in the backend's layout, and the host's experts in the library's.

        Raises:
            ConfigError: prompts are to be rounded, and the model has nothing that does it.
        """
        host = None
        if self.host is not None:
            host = HostSide(self.host.engine, self._device, self.precision.dtype)
            streaming = self.host.experts.streaming
            if streaming is not None and streaming.is_used:
                assert streaming.rows is not None
                host.stream(self.backend, rows=streaming.rows, piece_bytes=streaming.piece_bytes)
            if beacon is not None:
                self.host.engine.watch(beacon.address)

        def load(part: JoinedShard | None = None) -> Decoder:
            decoder = load_decoder(
                source,
                self.backend,
                self._device,
                self.precision.dtype,
                on_progress,
                context_length=context_length,
                host=host,
                host_layers=() if self.host is None else self.host.experts.layers,
                part=part,
            )
            if self.rounds_prompts:
                prompts = PromptLayers(decoder.layers, self.backend)
                if not prompts.num_linears:
                    raise ConfigError(
                        f"--prompt-int8 cannot be had: {source.path.name} has no linears of 4 bits"
                        " whose inputs it could round; leave it out"
                    )
                decoder = replace(decoder, prompts=prompts)
            return decoder if beacon is None else replace(decoder, on_layer=beacon.advance)

        if self.ranks is None:
            return load()
        dtype = self.precision.dtype
        return self.ranks.load_torch(source, self._device, dtype, context_length, load)

    def operations(self) -> Operations:
        """Return the linears and attention for transformers' modules."""
        from appliance.model.fallback.operations import TorchOperations

        return TorchOperations(self.backend, self._device, self.precision.dtype)

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
        return self.backend.penalize

    @property
    def mask_tokens(self) -> MaskTokens:
        return self.backend.mask_tokens

    @property
    def score_tokens(self) -> ScoreTokens:
        return self.backend.score_tokens


def torch_step_device(device: torch.device, threads: int) -> Device:
    """Return a GPU as the device of steps, or the host with so many threads for torch."""
    import torch

    torch.set_num_threads(threads)
    if device.type != "cuda":
        return HostDevice()
    from appliance.engine.run.cuda_device import CudaDevice

    return CudaDevice(device)
