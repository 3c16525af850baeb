"""The interface of a way to execute models: its facts, and loading a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from appliance.kernels.kv_format import KVFormat, LayerPrecision, precisions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from appliance.engine.beacon import Beacon
    from appliance.engine.run.sampler import SampleTokens
    from appliance.kernels.penalties.rows import Penalize
    from appliance.kernels.token_mask.interface import MaskTokens
    from appliance.kernels.token_scores.interface import ScoreTokens
    from appliance.model.executor import Executor
    from appliance.model.source import ModelSource
    from appliance.model.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class Processor:
    """The processors of this machine, where torch is not needed to name them."""

    type: str = "cpu"

    def __str__(self) -> str:
        return self.type


@dataclass(frozen=True, slots=True)
class Precision:
    """Element types that "auto" resolves to on this device.

    Attributes:
        dtype: of activations and of weights that are not packed; NumPy's where the CPU library
            executes the model, torch's elsewhere.
    """

    device: torch.device | Processor
    dtype: Any
    kv_format: KVFormat  # of most layers; used in messages
    block_size: int
    kv_layers: tuple[LayerPrecision, ...] | None = None  # where layers differ

    def kv_of(self, num_layers: int) -> Sequence[LayerPrecision]:
        """Return the KV precision of each layer."""
        return self.kv_layers or precisions(self.kv_format, num_layers)

    def is_sealed(self, num_layers: int) -> bool:
        """Return True if any layer has open blocks."""
        return any(layer.format.is_sealed for layer in self.kv_of(num_layers))


class Execution(Protocol):
    """A way to execute models; it has loaded nothing yet."""

    @property
    def precision(self) -> Precision: ...

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

    def open_block_bytes(self, spec: DecoderSpec) -> int:
        """Return the bytes of one open block, all layers; 0 if none is sealed."""
        ...

    def load(
        self,
        source: ModelSource,
        on_progress: Callable[[str, int, int], None],
        context_length: int,
        beacon: Beacon | None = None,
    ) -> Executor[Any]:
        """Load a model that counts its layers on the beacon."""
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
        """Return the function that scores given tokens without waiting for the device."""
        ...
