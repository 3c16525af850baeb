"""Interface of an execution: a way to run models, with its facts and loader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

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
    from appliance.kernels.operations import MaskTokens, ScoreTokens
    from appliance.kernels.penalties.rows import Penalize
    from appliance.model.executor import Executor
    from appliance.model.source import ModelSource
    from appliance.model.spec import DecoderSpec


class Execution(Protocol):
    """A way to execute models; has loaded nothing yet."""

    @property
    def precision(self) -> Precision: ...

    @property
    def name(self) -> str: ...

    @property
    def ranks(self) -> Ranks | None:
        """The ranks that divide the model; None: this process has all of it."""
        ...

    @property
    def uses_triton(self) -> bool:
        """True if Triton kernels run steps and move blocks."""
        ...

    @property
    def in_library(self) -> bool:
        """True if the CPU library executes whole steps.

        Then no row's result depends, bit for bit, on other rows of the step.
        """
        ...

    @property
    def activation_bytes(self) -> int: ...

    def step_device(self, threads: int) -> Device:
        """Return the device that runs steps; torch takes so many threads."""
        ...

    def started(self, source: ModelSource) -> Execution:
        """Start the processes of other ranks, if there are any, and measure them.

        Raises:
            EngineError: a rank could not be started, or its link may not be used.
        """
        ...

    def with_host_experts(
        self, experts: ExpertsOnHost, config: EngineConfig, threads: int
    ) -> Execution:
        """Leave some experts to the CPU library, if there are any; only torch does so."""
        ...

    def kept_weights(self, model: Path) -> PackedModels | None:
        """Return where packed weights of a model beside the served one are kept.

        None: nothing is packed, or it is not kept.
        """
        ...

    def weight_bytes(self, source: ModelSource) -> int:
        """Estimate the bytes of the weights, rounded up."""
        ...

    def kv_bytes_per_token(self, spec: DecoderSpec) -> int:
        """Return the bytes per token in the cache, all layers."""
        ...

    def open_block_bytes(self, spec: DecoderSpec) -> int:
        """Return the bytes of one open block, all layers; 0 without sealed layers."""
        ...

    def state_bytes(self, spec: DecoderSpec) -> int:
        """Return the bytes of a sequence's recurrent state, all layers; 0 without such layers."""
        ...

    def load(
        self,
        source: ModelSource,
        on_progress: Callable[[str, int, int], None],
        context_length: int,
        beacon: Beacon | None = None,
    ) -> Executor[Any]:
        """Load a model, which then counts its layers on the beacon."""
        ...

    def sample_tokens(self, spec: DecoderSpec, max_rows: int) -> SampleTokens:
        """Return the function that samples tokens without waiting for the device.

        Raises:
            UnsupportedModelError: no kernel supports the vocabulary size.
        """
        ...

    @property
    def penalize(self) -> Penalize:
        """Function that applies penalties without waiting for the device."""
        ...

    @property
    def mask_tokens(self) -> MaskTokens:
        """Function that bans tokens without waiting for the device."""
        ...

    @property
    def score_tokens(self) -> ScoreTokens:
        """Function that scores given tokens without waiting for the device."""
        ...
