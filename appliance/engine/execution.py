"""Chooses what executes a model: the CPU library, or torch with a backend's kernels."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from appliance.errors import ConfigError
from appliance.kernels.backend import Backend, select_backend
from appliance.kernels.cpu.cache import bytes_per_token
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.library import LibraryError, load_library, select_isa
from appliance.kernels.cpu.structs import Isa
from appliance.kernels.kv_cache import KVFormat, KVPages, LayerPrecision, precisions
from appliance.kernels.kv_page.layout import PAGE_TOKENS
from appliance.kernels.penalties import cpu as penalties_on_cpu
from appliance.kernels.sampling import batched
from appliance.kernels.sampling.cpu import NativeSampling
from appliance.kernels.token_mask import reference as masks_by_torch
from appliance.kernels.token_mask.cpu import NativeMasks
from appliance.kernels.token_scores import reference as scores_by_torch
from appliance.kernels.token_scores.cpu import NativeScores
from appliance.model.executor import heads_of
from appliance.model.loader import load_decoder
from appliance.model.native_loader import load_native, why_unsupported
from appliance.model.size import estimate_native_bytes, estimate_weight_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from appliance.config import EngineConfig
    from appliance.engine.run.sampler import SampleTokens
    from appliance.kernels.penalties.rows import Penalize
    from appliance.kernels.token_mask.reference import MaskTokens
    from appliance.kernels.token_scores.reference import ScoreTokens
    from appliance.model.executor import Executor
    from appliance.model.source import ModelSource
    from appliance.model.spec import DecoderSpec

logger = logging.getLogger(__name__)

SCALAR_NOTE = (
    "this CPU has none of the vector instructions that the CPU library is written for (AVX2 or "
    "later): it runs its plain C code, which is many times slower"
)
# The library sums in one order whatever the step holds; torch's products have no fixed order.
TORCH_NOTE = (
    "torch executes the model, not the CPU library: slower, with dense weights, and a seeded "
    "answer may change with what else is in the batch"
)


@dataclass(frozen=True, slots=True)
class Precision:
    """Element types that "auto" resolves to on this device."""

    device: torch.device
    dtype: torch.dtype
    kv_format: KVFormat  # of most layers; used in messages
    block_size: int
    kv_layers: tuple[LayerPrecision, ...] | None = None  # where layers differ

    def kv_of(self, num_layers: int) -> Sequence[LayerPrecision]:
        """Return the KV precision of each layer."""
        return self.kv_layers or precisions(self.kv_format, num_layers)

    def is_sealed(self, num_layers: int) -> bool:
        """Return True if any layer has open pages."""
        return any(layer.format.is_sealed for layer in self.kv_of(num_layers))


class Execution(Protocol):
    """A way to execute models; it has loaded nothing yet."""

    @property
    def precision(self) -> Precision:
        """Element types."""
        ...

    @property
    def name(self) -> str:
        """Name for people."""
        ...

    @property
    def uses_triton(self) -> bool:
        """True if Triton kernels run steps and move blocks."""
        ...

    @property
    def activation_bytes(self) -> int:
        """Bytes per activation element."""
        ...

    def weight_bytes(self, source: ModelSource) -> int:
        """Estimate the bytes of the weights, rounded up."""
        ...

    def kv_bytes_per_token(self, spec: DecoderSpec) -> int:
        """Return the bytes of one token in the cache, all layers."""
        ...

    def open_page_bytes(self, spec: DecoderSpec) -> int:
        """Return the bytes of one open page, all layers; 0 if none is sealed."""
        ...

    def load(
        self,
        source: ModelSource,
        on_progress: Callable[[str, int, int], None],
        context_length: int,
    ) -> Executor[Any]:
        """Load the weights."""
        ...

    def sample_tokens(self, spec: DecoderSpec, max_rows: int) -> SampleTokens:
        """Return the function that draws tokens without waiting for the device.

        Raises:
            UnsupportedModelError: no kernel covers the vocabulary.
        """
        ...

    @property
    def penalize(self) -> Penalize:
        """Function that lowers logits without waiting for the device."""
        ...

    @property
    def mask_tokens(self) -> MaskTokens:
        """Function that bans tokens without waiting for the device."""
        ...

    @property
    def score_tokens(self) -> ScoreTokens:
        """What says what logits mean for given tokens, without waiting for the device."""
        ...


@dataclass(frozen=True, slots=True)
class NativeExecution:
    """The CPU library."""

    precision: Precision
    engine: NativeEngine
    isa: str

    @property
    def name(self) -> str:
        """Name with the instruction set in use."""
        return f"cpu library ({self.isa})"

    @property
    def uses_triton(self) -> bool:
        """False."""
        return False

    @property
    def activation_bytes(self) -> int:
        """4: everything between two weights is float32."""
        return 4

    def weight_bytes(self, source: ModelSource) -> int:
        """Count packed weights by their codes, all others in `dtype`."""
        return estimate_native_bytes(source, self.precision.dtype)

    def kv_bytes_per_token(self, spec: DecoderSpec) -> int:
        """Divide whole pages of the library by their tokens."""
        layers = self.precision.kv_of(len(spec.layers))
        return sum(
            bytes_per_token(self.engine.library, layer.format, heads, width)
            for layer, (heads, width) in zip(layers, heads_of(spec), strict=True)
        )

    def open_page_bytes(self, spec: DecoderSpec) -> int:
        """Count a block's tokens at 8 bits in the sealed layers."""
        layers = self.precision.kv_of(len(spec.layers))
        return self.precision.block_size * sum(
            bytes_per_token(self.engine.library, KVFormat.INT8, heads, width)
            for layer, (heads, width) in zip(layers, heads_of(spec), strict=True)
            if layer.format.is_sealed
        )

    def load(
        self,
        source: ModelSource,
        on_progress: Callable[[str, int, int], None],
        context_length: int,
    ) -> Executor[Any]:
        """Load the weights into the library's tiles."""
        return load_native(
            source,
            self.engine,
            self.precision.dtype,
            on_progress,
            context_length=context_length,
        )

    def sample_tokens(self, spec: DecoderSpec, max_rows: int) -> SampleTokens:
        """Return the library's sampling."""
        return NativeSampling(self.engine)

    @property
    def penalize(self) -> Penalize:
        """Torch's function."""
        return penalties_on_cpu.penalize

    @property
    def mask_tokens(self) -> MaskTokens:
        """The library's function."""
        return NativeMasks(self.engine.library)

    @property
    def score_tokens(self) -> ScoreTokens:
        """The library's."""
        return NativeScores(self.engine)


@dataclass(frozen=True, slots=True)
class TorchExecution:
    """The torch decoder with one backend's kernels."""

    precision: Precision
    backend: Backend

    @property
    def name(self) -> str:
        """The backend's name."""
        return self.backend.name

    @property
    def uses_triton(self) -> bool:
        """True for the Triton backend."""
        return self.backend.name == "triton"

    @property
    def activation_bytes(self) -> int:
        """Size of the dtype."""
        return self.precision.dtype.itemsize

    def weight_bytes(self, source: ModelSource) -> int:
        """Estimate the backend's layout of the weights."""
        return estimate_weight_bytes(source, self.precision.device, self.precision.dtype)

    def kv_bytes_per_token(self, spec: DecoderSpec) -> int:
        """Count elements and scales."""
        layers = self.precision.kv_of(len(spec.layers))
        return sum(
            KVPages.bytes_per_token(layer.format, *heads)
            if self.uses_triton or not layer.format.has_elements
            else layer.format.bytes_per_token(*heads)
            for layer, heads in zip(layers, heads_of(spec), strict=True)
        )

    def open_page_bytes(self, spec: DecoderSpec) -> int:
        """Count a block's tokens at 8 bits in the sealed layers."""
        layers = self.precision.kv_of(len(spec.layers))
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
    ) -> Executor[Any]:
        """Load the weights in the backend's layout."""
        return load_decoder(
            source,
            self.backend,
            self.precision.device,
            self.precision.dtype,
            on_progress,
            context_length=context_length,
        )

    def sample_tokens(self, spec: DecoderSpec, max_rows: int) -> SampleTokens:
        """Return Triton's sampling, or torch's.

        Raises:
            UnsupportedModelError: no kernel covers the vocabulary.
        """
        if not self.uses_triton:
            return batched.choose
        from appliance.kernels.sampling.launch import DeviceSampling

        return DeviceSampling(max_rows, spec.vocab_size, self.precision.device)

    @property
    def penalize(self) -> Penalize:
        """Triton's function, or torch's."""
        if not self.uses_triton:
            return penalties_on_cpu.penalize
        from appliance.kernels.penalties.launch import penalize

        return penalize

    @property
    def mask_tokens(self) -> MaskTokens:
        """Triton's function, or torch's."""
        if not self.uses_triton:
            return masks_by_torch.mask_tokens
        from appliance.kernels.token_mask.launch import mask_tokens

        return mask_tokens

    @property
    def score_tokens(self) -> ScoreTokens:
        """Torch's."""
        return scores_by_torch.score_tokens


def choose_execution(
    config: EngineConfig, precision: Precision, source: ModelSource, threads: int
) -> tuple[Execution, tuple[str, ...]]:
    """Choose the fastest execution available.

    Returns:
        The execution, and notes for the user.

    Raises:
        ConfigError: the settings ask for something this execution cannot do.
    """
    notes: list[str] = []
    num_layers = len(source.spec.layers)
    _check_block_size(precision, num_layers)
    if precision.device.type == "cpu" and config.kernels == "auto":
        reason = why_not_native(config, source)
        if reason is None:
            library = load_library()
            isa = select_isa(library, config.cpu_isa)
            if isa is Isa.SCALAR and config.cpu_isa == "auto":
                logger.warning("%s", SCALAR_NOTE)
                notes.append(SCALAR_NOTE)
            engine = NativeEngine(library, threads)
            return NativeExecution(precision, engine, isa.name), tuple(notes)
        if config.cpu_isa != "auto":
            raise ConfigError(f"--cpu-isa {config.cpu_isa} cannot be had: {reason}")
        logger.warning("%s: %s", TORCH_NOTE, reason)
        notes.append(f"{TORCH_NOTE}: {reason}")
    elif precision.device.type == "cpu":
        notes.append(TORCH_NOTE)
    on_pages = not all(layer.format.has_elements for layer in precision.kv_of(num_layers))
    if on_pages and precision.block_size != PAGE_TOKENS:
        raise ConfigError(
            f"{precision.kv_format.value} KV blocks hold {PAGE_TOKENS} tokens where torch executes "
            f"the model, not {precision.block_size}; leave --block-size out"
        )
    choice = "reference" if config.kernels == "reference" else "auto"
    backend = select_backend(precision.device, choice)
    if backend.name == "triton":
        _check_kernels(source.spec, precision)
    return TorchExecution(precision, backend), tuple(notes)


def _check_block_size(precision: Precision, num_layers: int) -> None:
    if precision.is_sealed(num_layers) and precision.block_size != PAGE_TOKENS:
        raise ConfigError(
            f"{precision.kv_format.value} KV blocks share scales between {PAGE_TOKENS} tokens, so "
            f"--block-size {precision.block_size} cannot be; leave it out"
        )


def why_not_native(config: EngineConfig, source: ModelSource) -> str | None:
    """Say why the CPU library cannot execute a model on this machine; None if it can."""
    if config.block_size is not None and config.block_size % 16:
        return f"its blocks hold a multiple of 16 tokens, not {config.block_size}"
    try:
        select_isa(load_library(), config.cpu_isa)
    except LibraryError as error:
        return str(error)
    return why_unsupported(source)


def _check_kernels(spec: DecoderSpec, precision: Precision) -> None:
    from appliance.kernels.norm_rope.launch import check_supported as check_norm
    from appliance.kernels.paged_attention.launch import check_supported
    from appliance.kernels.sampling.launch import check_vocabulary

    check_norm(spec.hidden_size, precision.dtype)
    check_vocabulary(spec.vocab_size)
    layers = zip(spec.layers, precision.kv_of(len(spec.layers)), strict=True)
    for index, (layer, kv) in enumerate(layers):
        attention = layer.attention
        check_supported(
            attention.num_heads,
            attention.num_kv_heads,
            attention.head_dim,
            precision.block_size,
            precision.dtype,
            kv.format,
            layer=index,
        )
