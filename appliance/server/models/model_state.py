"""A served model as routes see it: engine, tokenizer, names, queue and metrics."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Protocol

import msgspec

from appliance.config.api_keys import NO_KEY
from appliance.engine.process.supervisor import EngineState
from appliance.engine.run.adapters.adapter_names import LATEST, AdapterRegistry
from appliance.errors import ApplianceError, EngineUnavailableError, UnknownModelError
from appliance.model_files.sampling_defaults import (
    NOTHING_RECOMMENDED,
    SamplingDefaults,
    choose_defaults,
)
from appliance.runtime import settle
from appliance.server.metrics.metrics import Metrics
from appliance.server.models.grammar_checks import GrammarChecks
from appliance.server.models.queue import Queue

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from appliance.config import EngineConfig, ServerConfig
    from appliance.engine.nouns.messages import EngineInfo, StepReport
    from appliance.engine.process.replica_set import ServedEngine
    from appliance.engine.process.supervisor import ProgressCallback
    from appliance.events import QualityFact
    from appliance.media.pictures import Pictures
    from appliance.server.http.limits import KeyUse
    from appliance.server.models.state import ServerState
    from appliance.server.models.text_threads import TextThreads
    from appliance.tokenizer import Tokenizer

_MOST_NAMES = 20  # adapter names in a message
OTHER_NAMES = "[aliases] in the configuration gives a model other names"

logger = logging.getLogger(__name__)


class FoundModel(Protocol):
    """A model on this machine."""

    @property
    def path(self) -> Path: ...

    @property
    def name(self) -> str:
        """The model's name, unless the settings give one."""
        ...

    @property
    def sampling(self) -> SamplingDefaults:
        """Recommended sampling for a model that has none."""
        ...


@dataclass(frozen=True, slots=True)
class ServedCard:
    """The quality card of the served weights.

    Attributes:
        facts: its figures, for dashboards and metrics.
    """

    as_json: bytes
    facts: tuple[QualityFact, ...]


@dataclass(frozen=True, slots=True)
class ModelToServe:
    """A model on this machine.

    Attributes:
        engine: its settings, with local paths of adapters and draft model.
        quality_card: None if it has none.
    """

    model: FoundModel
    engine: EngineConfig
    quality_card: ServedCard | None = None

    @property
    def local_engine(self) -> EngineConfig:
        """Its settings, with the model's path too."""
        return msgspec.structs.replace(self.engine, model=str(self.model.path))


@dataclass(frozen=True, slots=True)
class MissingModel:
    """A configured model that cannot be had at the moment.

    Attributes:
        engine: its settings as they were given.
        reason: why it cannot be had.
        find: tries again, for long if it has to fetch files; raises ApplianceError.
    """

    name: str
    engine: EngineConfig
    reason: str
    find: Callable[[], ModelToServe]


class ModelState:
    """One model of a server.

    Args:
        server: state shared by its models.
        found: its files; those of a missing model are sought again when a request needs them.

    Attributes:
        tokenizer: None until loaded.
        pictures: decodes pictures; None until loaded, and of a model that reads texts alone.
        sampling: defaults for requests.
        adapters: adapters, which requests name like models.
        grammars: checks requested formats.
    """

    def __init__(
        self,
        server: ServerState,
        engine: ServedEngine,
        found: FoundModel | MissingModel,
        model_id: str,
        *,
        quality_card: ServedCard | None = None,
    ) -> None:
        self.server = server
        self.engine = engine
        self.model_id = model_id
        self.quality_card = quality_card
        self.tokenizer: Tokenizer | None = None
        self.pictures: Pictures | None = None
        self.sampling = NOTHING_RECOMMENDED
        self.metrics = Metrics(model_id, server.metrics)
        self.grammars = GrammarChecks()
        self.adapters = AdapterRegistry(engine.config, model_id)
        self.queue = Queue(server.config, engine, self.metrics, server.keys)
        self._found = found
        if isinstance(found, MissingModel):
            engine.lack(found.reason)
        self._loading: asyncio.Task[EngineInfo] | None = None
        engine.observers += [self._take_warnings, self.metrics.take_steps, self._rest]

    @property
    def is_gguf(self) -> bool:
        """True if the model is a GGUF file, False if it is a checkpoint's folder."""
        return not isinstance(self._found, MissingModel) and self._found.path.suffix == ".gguf"

    @property
    def config(self) -> ServerConfig:
        return self.server.config

    @property
    def use(self) -> KeyUse:
        return self.server.use

    @property
    def texts(self) -> TextThreads:
        """Threads for templates and tokenizers, which keep long texts off the event loop."""
        return self.server.texts

    @property
    def several_keys(self) -> bool:
        return self.server.several_keys

    @property
    def key_names(self) -> list[str]:
        return list(self.server.keys() or (NO_KEY,))

    @property
    def quality_facts(self) -> tuple[QualityFact, ...]:
        return () if self.quality_card is None else self.quality_card.facts

    def _take_warnings(self, report: StepReport) -> None:
        for line in report.logs:
            self.server.warnings.add(line)

    def _rest(self, report: StepReport) -> None:
        """Stop the tokenizer's processes when the engine sleeps."""
        if self.engine.state is EngineState.ASLEEP and self.tokenizer is not None:
            self.tokenizer.rest()
            if self.pictures is not None:
                self.pictures.rest()

    @property
    def is_loaded(self) -> bool:
        """True once the model has been loaded, even while it sleeps."""
        return self.tokenizer is not None and self.engine.info is not None

    def begin_loading(
        self, on_progress: ProgressCallback = lambda stage, done, total: None
    ) -> asyncio.Task[EngineInfo]:
        """Load tokenizer and model for the first time, once for all callers."""
        if self._loading is None or (self._loading.done() and not self.is_loaded):
            self._loading = asyncio.create_task(self._load(on_progress), name="model-loading")
        return self._loading

    async def loaded(self) -> None:
        """Wait until the model has been loaded.

        Raises:
            EngineUnavailableError: loading failed; the next call tries again.
        """
        if self.is_loaded:
            return
        try:
            await asyncio.shield(self.begin_loading())
        except EngineUnavailableError:
            raise
        except ApplianceError as error:
            raise EngineUnavailableError(
                f"the model {self.model_id!r} cannot be loaded: {error}"
            ) from error

    @property
    def is_missing(self) -> bool:
        """True if its files could not be had when they were last sought."""
        return isinstance(self._found, MissingModel)

    async def _files(self) -> FoundModel:
        """Return the model's files; seek those that are missing."""
        missing = self._found
        if not isinstance(missing, MissingModel):
            return missing
        try:
            served = await _in_daemon(missing.find)
        except ApplianceError as error:
            self.engine.lack(str(error))
            raise
        self.engine.configure(served.local_engine)
        self.quality_card = served.quality_card
        self.adapters = AdapterRegistry(served.engine, self.model_id)
        self._found = served.model
        return served.model

    async def _load(self, on_progress: ProgressCallback) -> EngineInfo:
        try:
            return await self._load_files(await self._files(), on_progress)
        except ApplianceError as error:
            if self.server.is_up:  # its waiters may be gone
                logger.error("%s cannot be loaded: %s", self.model_id, error)
            raise

    async def _load_files(self, found: FoundModel, on_progress: ProgressCallback) -> EngineInfo:
        reading = asyncio.ensure_future(asyncio.to_thread(_read_tokenizer, found.path))

        async def end_tokens() -> tuple[int, ...]:
            return (await reading).eos_token_ids

        loading = asyncio.create_task(self.engine.start(end_tokens, on_progress))
        try:
            tokenizer = await reading
            await asyncio.to_thread(tokenizer.try_template)
            info = await loading
        finally:
            loading.cancel()  # no effect if it has ended
            await asyncio.gather(loading, return_exceptions=True)
        self.sampling = choose_defaults(
            self.engine.config.generation_config, tokenizer.sampling, found.sampling
        )
        if info.reads_pictures:
            from appliance.media.pictures import Pictures

            self.pictures = await asyncio.to_thread(
                Pictures.of_model,
                found.path,
                self.engine.config.image_tokens,
                info.projector,
            )
        self.tokenizer = tokenizer
        settle()
        return info

    def unload(self) -> None:
        """Put the engine to sleep after its open requests; the next one wakes it."""
        for replica in self.engine.replicas:
            if replica.state is EngineState.READY:
                replica.place.ask_to_leave()

    async def close(self, *, now: bool = False) -> None:
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        await self.engine.close(now=now)
        if self.tokenizer is not None:
            self.tokenizer.close()
        if self.pictures is not None:
            self.pictures.close()
        self.grammars.close()

    @property
    def unavailable(self) -> str | None:
        """Reason to refuse requests, in one word; None if it accepts them."""
        return "draining" if self.server.draining else self.not_working

    @property
    def doubtful(self) -> bool:
        """True if the engine is silent unusually long, but not yet hung."""
        return self.engine.state is EngineState.READY and not self.engine.responsive

    @property
    def not_working(self) -> str | None:
        """The engine's state if it takes no requests; None if it works or sleeps."""
        if self.engine.state.accepts and self.tokenizer is not None:
            return None
        state = self.engine.state
        return EngineState.LOADING.value if state.accepts else state.value

    def serving(self) -> tuple[EngineInfo, Tokenizer]:
        """Return the loaded model.

        Raises:
            EngineUnavailableError: it is not loaded at the moment.
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

    @property
    def aliases(self) -> list[str]:
        return [alias for alias, name in self.server.aliases.items() if name == self.model_id]

    def has_name(self, name: str | None) -> bool:
        """Return True if the name means this model or an adapter of it, tagged or not.

        Clients that list models as Ollama's may ask on any route, by the names of that list.
        """
        if name is None:
            return True
        names = (name, name.removesuffix(LATEST))
        if any(self.model_id in (one, self.server.aliases.get(one)) for one in names):
            return True
        return self.adapters.find(name) is not None

    def check_model(self, name: str | None) -> None:
        """Raise UnknownModelError unless the name is the model's or an adapter's."""
        if not self.has_name(name):
            raise UnknownModelError(
                f"the model {(name or '')[:100]!r} is not served here; the one that is:"
                f" {self.in_words()}; {OTHER_NAMES}"
            )

    def in_words(self) -> str:
        """Format the names of the model and its adapters."""
        adapters = [repr(one) for one in self.adapters.names()[:_MOST_NAMES]]
        beside = f", and as adapters of it {', '.join(adapters)}" if adapters else ""
        return f"{self.model_id!r}{beside}"


async def _in_daemon(find: Callable[[], ModelToServe]) -> ModelToServe:
    """Call in a thread that keeps no process alive: a download may outlast the server."""
    found: Future[ModelToServe] = Future()
    found.set_running_or_notify_cancel()

    def run() -> None:
        try:
            found.set_result(find())
        except BaseException as error:
            found.set_exception(error)

    Thread(target=run, name="finds-model", daemon=True).start()
    return await asyncio.wrap_future(found)


def _read_tokenizer(path: Path) -> Tokenizer:
    from appliance.tokenizer import Tokenizer  # slow; the engine loads meanwhile

    return Tokenizer.from_path(path)
