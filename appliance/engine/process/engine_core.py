"""The engine's interface to the process loop; `LLMEngine` and `EncoderEngine` fulfil it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.config import EngineConfig
    from appliance.engine.memory.admission import Admission
    from appliance.engine.nouns.beacon import Beacon
    from appliance.engine.nouns.messages import EngineInfo, StepReport, Table, Vocabulary
    from appliance.engine.nouns.request import AdapterRef, Request
    from appliance.stats import EngineStats, SequenceView, StepView


class EngineCore(Protocol):
    info: EngineInfo

    @property
    def has_work(self) -> bool:
        """True if a step would do something."""
        ...

    def set_vocabulary(self, vocabulary: Vocabulary) -> None: ...

    def submit(self, request: Request) -> None:
        """Queue a request, or raise RequestError."""
        ...

    def abort(self, request_id: str, index: int | None = None) -> bool:
        """Stop a request or one choice of it; return False if it is unknown."""
        ...

    def step(self) -> StepReport: ...

    def stats(self) -> EngineStats: ...

    def sequences(self) -> tuple[SequenceView, ...]: ...

    def take_steps(self) -> tuple[StepView, ...]: ...

    def load_adapter(self, ref: AdapterRef) -> None:
        """Read an adapter before its first request; a report has the answer."""
        ...

    def unload_adapter(self, ref: AdapterRef) -> None:
        """Forget an adapter once no request uses it."""
        ...

    def block_table(self, request_id: str, index: int) -> Table: ...

    def close(self) -> None:
        """Save everything that must outlive the process; takes some seconds at most."""
        ...


class LoadEngine(Protocol):
    """`load_engine`."""

    def __call__(
        self,
        config: EngineConfig,
        *,
        eos_token_ids: Callable[[], tuple[int, ...]],
        metadata: memoryview | None,
        on_progress: Callable[[str, int, int], None],
        beacon: Beacon,
        admission: Admission,
    ) -> EngineCore:
        """Load a model, or raise ApplianceError."""
        ...
