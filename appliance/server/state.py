"""The state that all routes of one server share: models, settings, keys, metrics and log."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from appliance.api_keys import BARE_NAME, NO_KEY
from appliance.config import check_names
from appliance.engine.process.supervisor import EngineState
from appliance.errors import ApplianceError, ConfigError, UnknownModelError
from appliance.log import RecentWarnings
from appliance.server.key_ring import KeyRing
from appliance.server.limits import KeyUse
from appliance.server.machine import MachineProbe
from appliance.server.shared_metrics import SharedMetrics

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.config import ServerConfig
    from appliance.server.model_state import ModelState

LATEST = ":latest"  # Ollama's clients add it


@dataclass(slots=True)
class ServerState:
    """One server.

    Attributes:
        aliases: further names of models, each with the id it stands for.
        models: what is served, at least one; the first is meant where a request names none.
        is_up: a model was loaded, so that requests may ask for any.
        draining: no new requests; those in flight go on.
        closing: streams without an end are to end.
        jobs_folder: where long tasks on this machine tell how far they are; None looks nowhere.
        warnings: of this process and the engines', for whoever watches.
        keys: that are let in.
        use: what their holders use of what they may.
        text_pool: threads for templates and tokenizers, so that long texts stall nobody.
    """

    config: ServerConfig
    aliases: dict[str, str] = field(default_factory=dict)
    models: list[ModelState] = field(default_factory=list)
    is_up: bool = False
    draining: bool = False
    closing: bool = False
    started: float = field(default_factory=time.time)  # Unix seconds
    jobs_folder: Path | None = None
    warnings: RecentWarnings = field(default_factory=RecentWarnings)
    metrics: SharedMetrics = field(default_factory=SharedMetrics)
    machine: MachineProbe = field(init=False)
    keys: KeyRing = field(init=False)
    use: KeyUse = field(init=False)
    text_pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="text")
    )

    def __post_init__(self) -> None:
        self.machine = MachineProbe(lambda: [model.engine for model in self.models])
        self.keys = KeyRing(self.config)
        self.use = KeyUse(self.keys)
        self.metrics.know_keys(self.keys() or (NO_KEY,))
        self.keys.observers.append(self.metrics.know_keys)

    def check_names(self) -> None:
        """Make sure that each name stands for one model or adapter.

        Raises:
            ConfigError: one stands for two, or an alias for none.
        """
        check_names([model.model_id for model in self.models], self.aliases)
        taken = {model.model_id: model.model_id for model in self.models} | self.aliases
        for model in self.models:
            for name in model.adapters.names():
                if name in taken and len(self.models) > 1:
                    raise ConfigError(
                        f"the adapter {name!r} of {model.model_id!r} has a name that stands for"
                        f" {taken[name]!r} already; give it another"
                    )
                taken[name] = model.model_id

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
    def default(self) -> ModelState:
        """The model that requests mean if they name none."""
        return self.models[0]

    def find(self, name: str | None) -> ModelState:
        """Return the model that a request names, by its id, an alias or one of its adapters.

        Raises:
            UnknownModelError: there is none.
        """
        if name is None:
            return self.default
        for exact in (True, False):  # an id goes before an adapter
            for model in self.models:
                if name == model.model_id if exact else model.has_name(name):
                    return model
        if len(self.models) == 1:
            self.default.check_model(name)
        known = "; ".join(model.in_words() for model in self.models)
        raise UnknownModelError(
            f"the model {name[:100]!r} is not served here; those that are: {known}"
        )

    def find_tagged(self, name: str | None) -> ModelState:
        """Return the model that a request names, with the tag that Ollama's clients add."""
        try:
            return self.find(name)
        except UnknownModelError:
            return self.find(None if name is None else name.removesuffix(LATEST))

    def check_room(self, owner: str) -> None:
        """Make sure that a request of a key may come, whichever model it names.

        Raises:
            EngineUnavailableError: no model can be served at the moment.
            QueueFullError: too many requests wait already.
        """
        first: ApplianceError | None = None
        for model in self.models:
            if self.is_up and not model.is_loaded and not self.draining:
                return  # it will be loaded
            try:
                model.serving()
                model.queue.check(owner)
            except ApplianceError as error:
                first = first or error
            else:
                return
        assert first is not None
        raise first

    def holder_of(self, request_id: str) -> ModelState | None:
        """Return the model that works on a request; None if it is not open."""
        for model in self.models:
            if model.engine.owner_of(request_id) is not None:
                return model
        return None

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return sum(model.engine.num_running + model.engine.num_waiting for model in self.models)

    @property
    def finished(self) -> int:
        """Requests that came to their end, well or not."""
        return sum(model.metrics.finished for model in self.models)

    def shown(self, before: ModelState | None = None) -> ModelState:
        """Return the model that a dashboard shows.

        It stays with the one before while nothing is asked of another, or both are at work.
        """
        current = before or self.default
        at_work = [model for model in self.models if model.engine.num_running]
        if not at_work or current in at_work:
            return current
        return max(at_work, key=lambda model: model.engine.place.last_used)

    @property
    def not_working(self) -> str | None:
        """The reason in one word why no model can be served, if so; asleep, it can."""
        can_load = self.is_up and not self.draining
        if can_load and any(not one.is_loaded for one in self.models):
            return None
        reasons = [model.not_working for model in self.models]
        return None if None in reasons else reasons[0]

    @property
    def state_word(self) -> str:
        """The liveliest state of all models."""
        states = [model.engine.state for model in self.models]
        for state in (EngineState.READY, EngineState.WAKING, EngineState.LOADING):
            if state in states:
                return "ok" if state is EngineState.READY else state.value
        return EngineState.ASLEEP.value
