"""What the routes share: the engine's client, the tokenizer, settings and metrics."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from appliance.api_keys import BARE_NAME, NO_KEY
from appliance.engine.process.supervisor import EngineState
from appliance.errors import EngineUnavailableError, UnknownModelError
from appliance.log import RecentWarnings
from appliance.sampling_defaults import NOTHING_RECOMMENDED, SamplingDefaults
from appliance.server.grammars import GrammarChecks
from appliance.server.key_ring import KeyRing
from appliance.server.limits import KeyUse
from appliance.server.machine import MachineProbe
from appliance.server.queue import Queue

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.config import ServerConfig
    from appliance.engine.messages import EngineInfo, StepReport
    from appliance.engine.process.client import EngineClient
    from appliance.server.metrics import Metrics
    from appliance.server.quality import ServedCard
    from appliance.tokenizer import Tokenizer


@dataclass(slots=True)
class ServerState:
    """One server.

    Attributes:
        model_id: the only id under which the model is served.
        tokenizer: None until it is read.
        sampling: what counts where a request says nothing.
        draining: no new requests; those in flight go on.
        closing: streams without an end are to end.
        quality_card: of the model, if it has one.
        jobs_folder: where long tasks on this machine tell how far they are; None looks nowhere.
        warnings: of this process and the engine's, for whoever watches.
        keys: that are let in.
        use: what their holders use of what they may.
        queue: of requests that wait.
        grammars: checks what requests ask of their answers.
        text_pool: threads for templates and tokenizers, so that long texts stall nobody.
    """

    config: ServerConfig
    engine: EngineClient
    model_id: str
    metrics: Metrics
    tokenizer: Tokenizer | None = None
    sampling: SamplingDefaults = NOTHING_RECOMMENDED
    draining: bool = False
    closing: bool = False
    quality_card: ServedCard | None = None
    started: float = field(default_factory=time.time)  # Unix seconds
    jobs_folder: Path | None = None
    warnings: RecentWarnings = field(default_factory=RecentWarnings)
    machine: MachineProbe = field(init=False)
    keys: KeyRing = field(init=False)
    use: KeyUse = field(init=False)
    queue: Queue = field(init=False)
    grammars: GrammarChecks = field(default_factory=GrammarChecks)
    text_pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="text")
    )

    def __post_init__(self) -> None:
        self.machine = MachineProbe(self.engine)
        self.keys = KeyRing(self.config)
        self.use = KeyUse(self.keys)
        self.queue = Queue(self.config, self.engine, self.metrics, self.keys)
        self.metrics.know_keys(self.keys() or (NO_KEY,))
        self.keys.observers.append(self.metrics.know_keys)
        self.engine.observers += [self._take_warnings, self.metrics.take_steps]

    def _take_warnings(self, report: StepReport) -> None:
        for line in report.logs:
            self.warnings.add(line)

    @property
    def several_keys(self) -> bool:
        """Whether more than one key is let in."""
        return len(self.keys()) > 1

    def may_manage(self, holder: str, owner: str) -> bool:
        """Whether a key may end a request, and see more of it than numbers.

        Where several are let in, those are its owner's and the one without a name.

        Args:
            holder: name of the key that asks.
            owner: name of the key that the request came with.
        """
        return not self.several_keys or holder in (BARE_NAME, owner)

    @property
    def unavailable(self) -> str | None:
        """In a word why requests are not accepted, if they are not."""
        return "draining" if self.draining else self.not_working

    @property
    def doubtful(self) -> bool:
        """Whether the engine shows no signs of life, for a time that may still be an accident."""
        return self.engine.state is EngineState.READY and not self.engine.responsive

    @property
    def not_working(self) -> str | None:
        """In a word why nothing is computed, if nothing is."""
        if self.engine.state is EngineState.READY and self.tokenizer is not None:
            return None
        state = self.engine.state
        return EngineState.LOADING.value if state is EngineState.READY else state.value

    def serving(self) -> tuple[EngineInfo, Tokenizer]:
        """What is loaded.

        Raises:
            EngineUnavailableError: nothing is, at the moment.
        """
        why = self.unavailable
        info, tokenizer = self.engine.info, self.tokenizer
        if why is None and info is not None and tokenizer is not None:
            return info, tokenizer
        reason = f" ({self.engine.reason})" if self.engine.reason else ""
        retry = "" if self.engine.state is EngineState.FAILED else "; try again in a moment"
        raise EngineUnavailableError(
            f"the server is not ready: {why}{reason}{retry}",
            retry_after=self.engine.seconds_to_start or None,
        )

    def check_model(self, name: str | None) -> None:
        """Accept the served model only.

        Raises:
            UnknownModelError: it is another.
        """
        if name is not None and name != self.model_id:
            raise UnknownModelError(
                f"the model {name[:100]!r} is not served here; the one that is: {self.model_id!r}"
            )
