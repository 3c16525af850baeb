"""The API process from start to end: listen, start the engine, serve, drain, exit."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop

from appliance.config import jobs_dir
from appliance.engine.process.client import EngineClient
from appliance.engine.process.launch import ENGINE_COMMAND
from appliance.errors import ApplianceError, EngineUnavailableError
from appliance.log import RecentWarnings
from appliance.server.certificate import Certificate
from appliance.server.listener import bind, url_of
from appliance.server.model_state import ModelState
from appliance.server.replicas import Memories, make_engine
from appliance.server.state import ServerState
from appliance.service.notice import ServiceNotice

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Sequence

    from appliance.config import EngineConfig, Settings
    from appliance.engine.messages import EngineInfo
    from appliance.engine.process.launch import LaunchedProcess
    from appliance.engine.process.replica import Replica
    from appliance.engine.process.residency import Residency
    from appliance.engine.process.supervisor import ProgressCallback
    from appliance.sampling_defaults import SamplingDefaults
    from appliance.server.model_state import FoundModel
    from appliance.server.quality import ServedCard
    from appliance.server.web_server import WebServer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that accepts requests.

    Attributes:
        name: id of the model in the API.
        chats: the model has a chat template.
        others: ids of the models to load on request.
        replicas: number of engine processes of the model.
    """

    url: str
    name: str
    info: EngineInfo
    chats: bool
    sampling: SamplingDefaults
    others: tuple[str, ...] = ()
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class ModelToServe:
    """A model on this machine, and its quality card, if any."""

    model: FoundModel
    quality_card: ServedCard | None = None


ReadyCallback = Callable[[RunningServer], object]


def run_server(
    settings: Settings,
    found: Sequence[ModelToServe],
    *,
    on_progress: ProgressCallback,
    on_ready: ReadyCallback,
    engine_command: Sequence[str] = ENGINE_COMMAND,
    launched: LaunchedProcess | None = None,
    warnings: RecentWarnings | None = None,
    notice: ServiceNotice | None = None,
) -> int:
    """Serve until a signal ends it.

    SIGTERM and SIGINT drain running streams; a second signal ends at once.

    Args:
        found: the models of `settings.served`; loads the first that loads now, others on request.
        on_progress: called with stage, done, total while the model loads.
        on_ready: called once the server accepts requests.
        launched: the first engine process, if already started.
        warnings: log lines kept for dashboards.
        notice: notifies the service manager, if any.

    Returns:
        Number of finished requests.

    Raises:
        ConfigError: the address is unavailable, a certificate is unusable, or two models share a
            name.
        ApplianceError: no model can be loaded.
    """
    with opened_server(
        settings,
        found,
        engine_command=engine_command,
        launched=launched,
        warnings=warnings,
        notice=notice,
    ) as server:
        uvloop.run(server.run(on_progress, on_ready))
    return server.state.finished


@contextmanager
def opened_server(
    settings: Settings,
    found: Sequence[ModelToServe],
    *,
    engine_command: Sequence[str] = ENGINE_COMMAND,
    launched: LaunchedProcess | None = None,
    warnings: RecentWarnings | None = None,
    notice: ServiceNotice | None = None,
) -> Iterator[ApiServer]:
    """Open the listening socket of a server that is not running yet; see `run_server`."""
    config = settings.server
    certificate = Certificate(config.tls_cert, config.tls_key) if config.tls_cert else None
    sock = bind(config)
    _allow_descriptors(config.max_connections)
    with sock:
        state = ServerState(
            config,
            settings.aliases,
            warnings=warnings or RecentWarnings(),
            jobs_folder=jobs_dir(),
        )
        memories = Memories(config.models_memory, is_shared=len(found) > 1)
        for model, of in zip(settings.served, found, strict=True):
            name = model.name or of.model.name

            def make(
                engine: EngineConfig,
                memory: Residency,
                place: int,
                replica: Replica | None,
                *,
                name: str = name,
                is_first: bool = of is found[0],
            ) -> EngineClient:
                return EngineClient(
                    engine,
                    command=engine_command,
                    launched=launched if is_first and place == 0 else None,
                    idle_timeout=config.idle_timeout,
                    residency=memory,
                    name=name if replica is None else f"replica {place} of {name}",
                    replica=replica,
                )

            engine = make_engine(
                msgspec.structs.replace(model.engine, model=str(of.model.path)), memories, make
            )
            state.models.append(
                ModelState(state, engine, of.model, name, quality_card=of.quality_card)
            )
        state.check_names()
        yield ApiServer(state, sock, certificate, notice or ServiceNotice())


class ApiServer:
    """One run of the API process."""

    def __init__(
        self,
        state: ServerState,
        sock: socket.socket,
        certificate: Certificate | None,
        notice: ServiceNotice,
    ) -> None:
        self._socket = sock
        self._certificate = certificate
        self._url = url_of(state.config, sock)
        self.state = state
        self._notice = notice
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(
        self, on_progress: ProgressCallback, on_ready: ReadyCallback, *, signals: bool = True
    ) -> None:
        """Serve until `stop`, or a signal if `signals`."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT) if signals else ():
            loop.add_signal_handler(number, self.stop)
        await self.state.default.engine.prepare()
        loading = asyncio.create_task(self._load(on_progress))
        web = await asyncio.to_thread(self._web_server)  # in parallel with the engine's start
        following = asyncio.create_task(self._certificate.follow()) if self._certificate else None
        serving = asyncio.create_task(web.serve(sockets=[self._socket]))
        stopping = asyncio.create_task(self._stop.wait())
        watching = asyncio.create_task(self._notice.watch(self._is_alive))
        try:
            await _first_of(loading, stopping, serving)
            if loading.done():
                on_ready(loading.result())
                names = ", ".join(model.model_id for model in self.state.models)
                self._notice.ready(f"serving {names} at {self._url}")
                await _first_of(stopping, serving)
                await self._drain()
        finally:
            self.state.draining = self.state.closing = True
            for task in (loading, stopping, watching):
                task.cancel()
            if following is not None:
                following.cancel()
            await asyncio.gather(loading, stopping, watching, return_exceptions=True)
            now = self._stop_now.is_set()
            await asyncio.gather(*(model.close(now=now) for model in self.state.models))
            web.stop(now=self._stop_now.is_set())
            await serving
            self.state.text_pool.shutdown(wait=False, cancel_futures=True)

    def _web_server(self) -> WebServer:
        from appliance.server.web_server import WebServer  # slow to import

        return WebServer.of(self.state, self._certificate)

    async def _load(self, on_progress: ProgressCallback) -> RunningServer:
        """Load the first model that loads; if none does, raise the first one's error."""
        failure: ApplianceError | None = None
        for model in self.state.models:
            try:
                info = await model.begin_loading(on_progress)
            except ApplianceError as error:
                if len(self.state.models) > 1:
                    logger.error("%s cannot be loaded: %s", model.model_id, error)
                failure = failure or error
                continue
            self.state.is_up = True
            _, tokenizer = model.serving()
            return RunningServer(
                self._url,
                model.model_id,
                info,
                tokenizer.chat_template is not None,
                model.sampling,
                tuple(one.model_id for one in self.state.models if one is not model),
                len(model.engine.replicas),
            )
        assert failure is not None
        raise failure

    async def _drain(self) -> None:
        """Refuse new requests, and give open ones time to finish."""
        self.state.draining = True
        self._notice.stopping()
        if self.state.num_open:
            logger.info("finishing requests in flight; another signal ends at once")
        end = asyncio.get_running_loop().time() + self.state.config.drain_timeout
        while self.state.num_open:
            if self._stop_now.is_set() or asyncio.get_running_loop().time() > end:
                break
            await asyncio.sleep(0.05)
        for model in self.state.models:
            model.engine.fail_all(EngineUnavailableError("the server is shutting down"))

    def _is_alive(self) -> bool:
        """Return False if an engine with work makes no progress; the watchdog should end it."""
        return not any(model.doubtful for model in self.state.models)

    def stop(self) -> None:
        """Drain and stop; a second call stops at once."""
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()


def _allow_descriptors(connections: int) -> None:
    """Raise the limit of open files for that many connections, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * connections + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


async def _first_of(*tasks: asyncio.Task[Any]) -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
