"""The state that routes share: the engine's client, the tokenizer, settings and metrics."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from appliance.adapter_names import AdapterRegistry
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


_MOST_NAMES = 20  # of adapters in a message


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
        adapters: names of adapters, which are served like models.
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
    adapters: AdapterRegistry = field(init=False)
    grammars: GrammarChecks = field(default_factory=GrammarChecks)
    text_pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="text")
    )

    def __post_init__(self) -> None:
        self.machine = MachineProbe(self.engine)
        self.keys = KeyRing(self.config)
        self.use = KeyUse(self.keys)
        self.adapters = AdapterRegistry(self.engine.config, self.model_id)
        self.queue = Queue(self.config, self.engine, self.metrics, self.keys)
        self.metrics.know_keys(self.keys() or (NO_KEY,))
        self.keys.observers.append(self.metrics.know_keys)
        self.engine.observers += [self._take_warnings, self.metrics.take_steps, self._rest]

    def _take_warnings(self, report: StepReport) -> None:
        for line in report.logs:
            self.warnings.add(line)

    def _rest(self, report: StepReport) -> None:
        """End the tokenizer's processes with the engine's."""
        if self.engine.state is EngineState.ASLEEP and self.tokenizer is not None:
            self.tokenizer.rest()

    @property
    def several_keys(self) -> bool:
        """True if more than one key is accepted."""
        return len(self.keys()) > 1

    def may_manage(self, holder: str, owner: str) -> bool:
        """Return True if a key may end a request, and see its text.

        Where several are let in, those are its owner's and the one without a name.

        Args:
            holder: name of the key that asks.
            owner: name of the key that the request came with.
        """
        return not self.several_keys or holder in (BARE_NAME, owner)

    @property
    def unavailable(self) -> str | None:
        """The reason in one word why requests are not accepted, if so."""
        return "draining" if self.draining else self.not_working

    @property
    def doubtful(self) -> bool:
        """True if the engine has been silent for a while that may still be an accident."""
        return self.engine.state is EngineState.READY and not self.engine.responsive

    @property
    def not_working(self) -> str | None:
        """The reason in one word why the engine takes nothing, if so; asleep, it does."""
        if self.engine.state.accepts and self.tokenizer is not None:
            return None
        state = self.engine.state
        return EngineState.LOADING.value if state.accepts else state.value

    def serving(self) -> tuple[EngineInfo, Tokenizer]:
        """Return the loaded model.

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
        """Accept the served model and its adapters only.

        Raises:
            UnknownModelError: it is another.
        """
        if name is None or name == self.model_id or self.adapters.find(name) is not None:
            return
        adapters = [repr(one) for one in self.adapters.names()[:_MOST_NAMES]]
        beside = f", and as adapters of it {', '.join(adapters)}" if adapters else ""
        raise UnknownModelError(
            f"the model {name[:100]!r} is not served here; the one that is:"
            f" {self.model_id!r}{beside}"
        )
