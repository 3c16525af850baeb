"""The state that all routes of a server share: models, settings, keys, metrics and log."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from appliance.config import check_names
from appliance.config.api_keys import BARE_NAME, NO_KEY
from appliance.engine.process.supervisor import EngineState
from appliance.errors import ApplianceError, ConfigError, EngineError, UnknownModelError
from appliance.log import RecentWarnings
from appliance.server.http.key_ring import KeyRing
from appliance.server.http.limits import KeyUse
from appliance.server.metrics.machine import MachineProbe
from appliance.server.metrics.metrics import SharedMetrics
from appliance.server.models.model_state import OTHER_NAMES
from appliance.server.models.text_threads import TextThreads

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.config import ServerConfig
    from appliance.server.http.image_urls import ImageUrls
    from appliance.server.models.model_state import ModelState

logger = logging.getLogger(__name__)


PICTURE_BYTES = 64 << 20  # of a body, in base64: of a whole conversation


@dataclass(slots=True)
class ServerState:
    """One server.

    Attributes:
        aliases: model id by alias.
        models: at least one; the first is the default.
        is_up: a model has been loaded, so the server accepts requests.
        ending: set to drain and end.
        failure: why it ends by itself; None if it does not.
        draining: refuse new requests while running ones finish.
        closing: end endless streams.
        jobs_folder: progress files of long tasks on this machine; None for none.
        warnings: log lines of this process and the engines, for dashboards.
        use: each key's use against its limits.
        texts: threads for templates and tokenizers.
        image_urls: fetches pictures from allowed addresses; None if there are none.
    """

    config: ServerConfig
    aliases: dict[str, str] = field(default_factory=dict)
    models: list[ModelState] = field(default_factory=list)
    is_up: bool = False
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    failure: EngineError | None = None
    draining: bool = False
    closing: bool = False
    started: float = field(default_factory=time.time)  # Unix seconds
    jobs_folder: Path | None = None
    warnings: RecentWarnings = field(default_factory=RecentWarnings)
    metrics: SharedMetrics = field(default_factory=SharedMetrics)
    machine: MachineProbe = field(init=False)
    keys: KeyRing = field(init=False)
    use: KeyUse = field(init=False)
    texts: TextThreads = field(default_factory=TextThreads)
    image_urls: ImageUrls | None = None

    def __post_init__(self) -> None:
        self.machine = MachineProbe(
            lambda: [one for model in self.models for one in model.engine.replicas]
        )
        self.keys = KeyRing(self.config)
        if self.config.allow_image_urls:
            from appliance.server.http.image_urls import ImageUrls  # takes a tenth of a second

            self.image_urls = ImageUrls(self.config.allow_image_urls)
        self.use = KeyUse(self.keys)
        self.metrics.know_keys(self.keys() or (NO_KEY,))
        self.keys.observers.append(self.metrics.know_keys)

    @property
    def max_body_bytes(self) -> int:
        """Largest body of a request; larger where a model reads pictures, and only for these."""
        reads = any(model.pictures is not None for model in self.models)
        return self.config.max_body_bytes + (PICTURE_BYTES if reads else 0)

    def fail(self, part: str, error: Exception | None = None) -> None:
        """Drain and end with an error, so that a service manager starts another server.

        Args:
            part: what the server lost, and cannot do without.
        """
        if self.closing:
            return
        why = "" if error is None else f": {error!r}"
        self.failure = self.failure or EngineError(f"{part} has ended{why}")
        logger.error("%s; the server ends", self.failure)
        self.ending.set()

    def check_names(self) -> None:
        """Check that each name means one model or adapter.

        Raises:
            ConfigError: a name means two, or an alias means none.
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
        """True if the server accepts more than one key."""
        return len(self.keys()) > 1

    def may_manage(self, holder: str, owner: str) -> bool:
        """Return True if a key (`holder`) may end a request of `owner` and see its text.

        With several keys, only the owner's and the nameless one may.
        """
        return not self.several_keys or holder in (BARE_NAME, owner)

    @property
    def default(self) -> ModelState:
        """The model of requests that name none."""
        return self.models[0]

    def find(self, name: str | None) -> ModelState:
        """Return a model by its id, an alias or one of its adapters.

        Raises:
            UnknownModelError: the server does not serve it.
        """
        if name is None:
            return self.default
        for exact in (True, False):  # ids take precedence over adapters
            for model in self.models:
                if name == model.model_id if exact else model.has_name(name):
                    return model
        if len(self.models) == 1:
            self.default.check_model(name)
        known = "; ".join(model.in_words() for model in self.models)
        raise UnknownModelError(
            f"the model {name[:100]!r} is not served here; those that are: {known}; {OTHER_NAMES}"
        )

    def check_room(self, owner: str) -> None:
        """Refuse a key's request if no model has room.

        Raises:
            EngineUnavailableError: no model is available at the moment.
            QueueFullError: too many requests wait.
        """
        first: ApplianceError | None = None
        for model in self.models:
            if self.is_up and not model.is_loaded and not self.draining:
                return  # the request loads it
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
        for model in self.models:
            if model.engine.owner_of(request_id) is not None:
                return model
        return None

    @property
    def num_open(self) -> int:
        return sum(model.engine.num_running + model.engine.num_waiting for model in self.models)

    @property
    def finished(self) -> int:
        return sum(model.metrics.finished for model in self.models)

    def shown(self, before: ModelState | None = None) -> ModelState:
        """Return the model for a dashboard to show.

        Keeps the last one, unless that is idle and another is busy.
        """
        current = before or self.default
        at_work = [model for model in self.models if model.engine.num_running]
        if not at_work or current in at_work:
            return current
        return max(at_work, key=lambda model: model.engine.place.last_used)

    @property
    def not_working(self) -> str | None:
        """The state if no model is available; None if one is, even asleep."""
        can_load = self.is_up and not self.draining
        if can_load and any(not one.is_loaded for one in self.models):
            return None
        reasons = [model.not_working for model in self.models]
        return None if None in reasons else reasons[0]

    @property
    def replica_states(self) -> dict[str, list[str]]:
        return {
            model.model_id: [replica.state.value for replica in model.engine.replicas]
            for model in self.models
            if len(model.engine.replicas) > 1
        }

    @property
    def ranks_in_words(self) -> dict[str, list[str]]:
        """The ranks by model, where several processes hold one."""
        infos = {model.model_id: model.engine.info for model in self.models}
        return {
            name: [str(rank) for rank in info.ranks]
            for name, info in infos.items()
            if info is not None and info.ranks
        }

    @property
    def unused_gpu(self) -> str:
        """Words of the first engine that may use no GPU of this machine; empty without one."""
        infos = (model.engine.info for model in self.models)
        return next((info.unused_gpu for info in infos if info is not None and info.unused_gpu), "")

    @property
    def state_word(self) -> str:
        """The most active state of all models."""
        states = [model.engine.state for model in self.models]
        for state in (EngineState.READY, EngineState.WAKING, EngineState.LOADING):
            if state in states:
                return "ok" if state is EngineState.READY else state.value
        return EngineState.ASLEEP.value
