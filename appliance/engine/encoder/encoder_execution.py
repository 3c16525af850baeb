"""Chooses what executes an encoder, the C library or torch, and counts what it will take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

import psutil

from appliance.engine.devices import Processor, choose_device, memory_budget, native_engine
from appliance.engine.memory.plan import MemoryPlan
from appliance.engine.packed_models import PackedModels
from appliance.errors import ConfigError, MemoryPlanError
from appliance.kernels.arrays import dtype_name, numpy_dtype
from appliance.kernels.cpu.library import LibraryError, load_library, select_isa
from appliance.model.encoder.native import (
    decoder_widths,
    decoder_workspace_bytes,
    native_bytes,
    why_unsupported,
    workspace_bytes,
)
from appliance.model.encoder.native_loader import load_native_decoder, load_native_encoder
from appliance.model.encoder.source import EncoderSource
from appliance.model.narrowed import narrowed
from appliance.model.native import why_unsupported as why_decoder_unsupported
from appliance.model.size import estimate_native_bytes, estimate_weight_bytes
from appliance.model.tensor_reader import DTYPE_NAMES
from appliance.runtime import resident_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from appliance.config import EngineConfig
    from appliance.engine.nouns.beacon import Beacon
    from appliance.kernels.cpu.engine import NativeEngine
    from appliance.model.encoder.spec import RankingSpec
    from appliance.model.encoder.texts import Texts
    from appliance.model.source import ModelSource
    from appliance.model.spec import ScoreSpec

MIB = 2**20
_STREAMS = 6  # of hidden states that live at once in a layer: the stream, QKV, heads' output, sum


class LoadedEncoder(Protocol):
    @property
    def ranking(self) -> RankingSpec | ScoreSpec | None: ...
    @property
    def num_token_types(self) -> int: ...
    @property
    def weight_format(self) -> str: ...

    def hidden(self, texts: Texts) -> NDArray[np.float32]:
        """Return the hidden states of all tokens, (num_tokens, hidden_size)."""
        ...

    def rank(self, chosen: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the head's logit of each pair, (num_pairs,), from (num_pairs, hidden_size)."""
        ...


class EncoderExecution(Protocol):
    """A way to execute an encoder; it has loaded nothing yet."""

    @property
    def name(self) -> str: ...
    @property
    def device(self) -> torch.device | Processor: ...
    @property
    def weight_bytes(self) -> int: ...

    def workspace_bytes(self, max_tokens: int) -> int:
        """Return the bytes of a step of so many tokens, beside the weights."""
        ...

    def load(self, on_progress: Callable[[str, int, int], None], beacon: Beacon) -> LoadedEncoder:
        """Read the weights; layers of later steps are counted on the beacon."""
        ...


def choose_encoder_execution(
    config: EngineConfig, source: EncoderSource | ModelSource, threads: int
) -> tuple[EncoderExecution, tuple[str, ...]]:
    """Choose the fastest execution available, with notes for the user.

    Raises:
        ConfigError: the settings ask for something that it cannot do.
    """
    device, reader = choose_device(config), _reader_of(source)
    # Vectors are compared by their last digits, and a small model has the time.
    if config.end_bits is not None:
        raise ConfigError("--end-bits cannot be had: a model that only reads is rounded whole")
    name = "float32" if config.dtype == "auto" else config.dtype
    if device.type == "cpu" and config.kernels == "auto":
        reason = _why_no_library(config) or reader.why_unsupported()
    else:
        reason = f"it goes to {device}, with --kernels {config.kernels}"
    if reason is None:
        engine, isa = native_engine(config, threads)
        reader = reader.rounded(config)
        native = _NativeExecution(config, reader, engine, isa.name, numpy_dtype(name), threads)
        return native, reader.native_notes
    for flag, is_asked in {
        f"--cpu-isa {config.cpu_isa}": config.cpu_isa != "auto",
        f"--weight-bits {config.weight_bits}": config.weight_bits is not None,
    }.items():
        if is_asked:
            raise ConfigError(f"{flag} cannot be had: the CPU library does not run it: {reason}")
    import torch

    torch.set_num_threads(threads)
    where = torch.device(device.type)
    on_cpu = (f"torch runs the encoder, not the CPU library: slower: {reason}",)
    notes = on_cpu if device.type == "cpu" else ()
    return _TorchExecution(reader, where, getattr(torch, name)), (*notes, *reader.notes)


def encoder_execution_on(
    config: EngineConfig, source: EncoderSource | ModelSource, gpu_bytes: int | None
) -> EncoderExecution:
    """Choose the execution here, or on a GPU that need not be here.

    Raises:
        ConfigError: the settings ask for something that it cannot do.
    """
    if gpu_bytes is None:
        return choose_encoder_execution(config, source, threads_of(config))[0]
    import torch

    if config.weight_bits is not None:
        raise ConfigError("--weight-bits cannot be had: a GPU computes with whole weights")
    where = torch.device("cuda")
    number = torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype)
    return _TorchExecution(_reader_of(source), where, number)


def threads_of(config: EngineConfig) -> int:
    """Return the threads that execute an encoder."""
    return config.threads or psutil.cpu_count(logical=False) or 1


def memory_for(
    config: EngineConfig, device: torch.device | Processor, gpu_bytes: int | None = None
) -> tuple[int, int]:
    """Return the free bytes of a device, or of a GPU's, and those that this process has taken."""
    if gpu_bytes is not None:
        return int(gpu_bytes * config.gpu_memory_utilization), 0
    taken = resident_bytes() if device.type == "cpu" else 0
    return memory_budget(device, config.gpu_memory_utilization), taken


def max_step(config: EngineConfig, context_length: int) -> int:
    """Return the most tokens of a step: a whole text at least."""
    return max(config.max_num_batched_tokens, context_length)


def plan_encoder(
    config: EngineConfig,
    source: EncoderSource | ModelSource,
    execution: EncoderExecution,
    free_bytes: int,
    process_bytes: int = 0,
) -> MemoryPlan:
    """Divide the free memory between weights and the largest step.

    Args:
        process_bytes: that the process has taken before.

    Raises:
        MemoryPlanError: it does not suffice.
    """
    longest = source.spec.context_length
    context = min(longest, config.max_model_len or longest)
    max_tokens = max_step(config, context)
    weight_bytes, workspace_bytes = execution.weight_bytes, execution.workspace_bytes(max_tokens)
    if weight_bytes + workspace_bytes > free_bytes:
        raise MemoryPlanError(
            f"{source.path.name} does not fit: weights {weight_bytes / MIB:,.0f} MiB + workspace "
            f"{workspace_bytes / MIB:,.0f} MiB for steps of {max_tokens:,} tokens, and "
            f"{free_bytes / MIB:,.0f} MiB are free; --max-num-batched-tokens and --max-model-len "
            "make the workspace smaller"
        )
    return MemoryPlan(
        num_blocks=0,
        block_size=1,
        context_length=context,
        weight_bytes=weight_bytes,
        kv_bytes=0,
        workspace_bytes=workspace_bytes,
        budget_bytes=free_bytes + process_bytes,
        process_bytes=process_bytes,
    )


def _why_no_library(config: EngineConfig) -> str | None:
    try:
        select_isa(load_library(), config.cpu_isa)
    except LibraryError as error:
        return str(error)
    return None


@dataclass(frozen=True, slots=True)
class _NativeExecution:
    config: EngineConfig
    reader: _EncoderReader | _DecoderReader
    engine: NativeEngine
    isa: str
    dtype: Any
    threads: int

    @property
    def name(self) -> str:
        return f"cpu library ({self.isa})"

    @property
    def device(self) -> Processor:
        return Processor()

    @property
    def weight_bytes(self) -> int:
        return self.reader.native_bytes(self.dtype, self.config.weight_bits)

    def workspace_bytes(self, max_tokens: int) -> int:
        most_texts = min(self.config.max_num_seqs, max_tokens)
        return self.reader.native_workspace(max_tokens, most_texts, self.threads)

    def load(self, on_progress: Callable[[str, int, int], None], beacon: Beacon) -> LoadedEncoder:
        self.engine.watch(beacon.address)
        bits = self.config.weight_bits
        kept = PackedModels.of(self.config)
        return self.reader.load_native(self.engine, self.dtype, bits, on_progress, kept)


@dataclass(frozen=True, slots=True)
class _TorchExecution:
    reader: _EncoderReader | _DecoderReader
    where: torch.device
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"torch in {DTYPE_NAMES[dtype_name(self.dtype)]}"

    @property
    def device(self) -> torch.device | Processor:
        return self.where if self.where.type == "cuda" else Processor()

    @property
    def weight_bytes(self) -> int:
        return self.reader.torch_bytes(self.where, self.dtype)

    def workspace_bytes(self, max_tokens: int) -> int:
        return max_tokens * self.reader.torch_width * int(self.dtype.itemsize)

    def load(self, on_progress: Callable[[str, int, int], None], beacon: Beacon) -> LoadedEncoder:
        return self.reader.load_torch(self.where, self.dtype, on_progress, beacon)


def _reader_of(source: EncoderSource | ModelSource) -> _EncoderReader | _DecoderReader:
    return _EncoderReader(source) if isinstance(source, EncoderSource) else _DecoderReader(source)


@dataclass(frozen=True, slots=True)
class _EncoderReader:
    """A model of an encoder's family."""

    source: EncoderSource
    notes: ClassVar[tuple[str, ...]] = ()
    native_notes: ClassVar[tuple[str, ...]] = ()

    def why_unsupported(self) -> str | None:
        return why_unsupported(self.source.spec)

    def rounded(self, config: EngineConfig) -> _EncoderReader:
        """Return the same: its weights are rounded while they are loaded."""
        return self

    def native_bytes(self, dtype: Any, bits: int | None) -> int:
        return native_bytes(self.source, dtype, bits)

    def native_workspace(self, max_tokens: int, most_texts: int, threads: int) -> int:
        return workspace_bytes(self.source.spec, max_tokens, most_texts, threads)

    def load_native(
        self,
        engine: NativeEngine,
        dtype: Any,
        bits: int | None,
        on_progress: Callable[[str, int, int], None],
        kept: PackedModels | None,
    ) -> LoadedEncoder:
        return load_native_encoder(self.source, engine, dtype, bits, on_progress)

    def torch_bytes(self, where: torch.device, dtype: torch.dtype) -> int:
        return self.source.num_parameters() * int(dtype.itemsize)

    @property
    def torch_width(self) -> int:
        """Numbers of a step per token."""
        spec = self.source.spec
        return _STREAMS * spec.hidden_size + spec.intermediate_size * (3 if spec.gated else 2)

    def load_torch(
        self,
        where: torch.device,
        dtype: torch.dtype,
        on_progress: Callable[[str, int, int], None],
        beacon: Beacon,
    ) -> LoadedEncoder:
        from appliance.model.encoder.loader import load_encoder

        loaded = load_encoder(self.source, dtype, where, on_progress, beacon.advance)
        return cast("LoadedEncoder", loaded)


@dataclass(frozen=True, slots=True)
class _DecoderReader:
    """A decoder that reads texts, without a cache."""

    source: ModelSource

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self.source.notes)

    @property
    def native_notes(self) -> tuple[str, ...]:
        return (*self.source.notes, *self.source.weights.notes())

    def why_unsupported(self) -> str | None:
        return why_decoder_unsupported(self.source)

    def rounded(self, config: EngineConfig) -> _DecoderReader:
        """Round the weights as `--weight-bits` says."""
        if config.weight_bits is None:
            return self
        found = narrowed(self.source, config.weight_bits)
        if found is None:
            raise ConfigError(
                f"--weight-bits {config.weight_bits}: most weights of {config.model} have no more"
                " bits already, or their width does not divide by 32; leave it out"
            )
        return _DecoderReader(found)

    def native_bytes(self, dtype: Any, bits: int | None) -> int:
        return estimate_native_bytes(self.source, dtype)

    def native_workspace(self, max_tokens: int, most_texts: int, threads: int) -> int:
        return decoder_workspace_bytes(self.source.spec, max_tokens, most_texts, threads)

    def load_native(
        self,
        engine: NativeEngine,
        dtype: Any,
        bits: int | None,
        on_progress: Callable[[str, int, int], None],
        kept: PackedModels | None,
    ) -> LoadedEncoder:
        return load_native_decoder(self.source, engine, dtype, on_progress, kept)

    def torch_bytes(self, where: torch.device, dtype: torch.dtype) -> int:
        return estimate_weight_bytes(self.source, where, dtype)

    @property
    def torch_width(self) -> int:
        """Numbers of a step per token."""
        spec = self.source.spec
        return _STREAMS * spec.hidden_size + sum(decoder_widths(spec))

    def load_torch(
        self,
        where: torch.device,
        dtype: torch.dtype,
        on_progress: Callable[[str, int, int], None],
        beacon: Beacon,
    ) -> LoadedEncoder:
        from appliance.model.encoder.decoder_loader import load_decoder_reader

        return load_decoder_reader(self.source, dtype, where, on_progress, beacon.advance)
