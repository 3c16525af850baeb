"""The API process: open its socket, models and engines; start, serve, drain, exit."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop

from appliance.config import jobs_dir
from appliance.engine.process.client import EngineClient
from appliance.engine.process.launch import ENGINE_COMMAND
from appliance.errors import ApplianceError, EngineUnavailableError, ModelError
from appliance.log import RecentWarnings
from appliance.long_lived import start_task
from appliance.server.http.certificate import Certificate
from appliance.server.http.listener import bind, url_of
from appliance.server.models.model_state import MissingModel, ModelState
from appliance.server.models.replicas import Memories, make_engine
from appliance.server.models.state import ServerState
from appliance.service.notice import ServiceNotice

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from appliance.config import EngineConfig, Settings
    from appliance.engine.nouns.messages import EngineInfo
    from appliance.engine.process.client import Replica
    from appliance.engine.process.launch import LaunchedProcess
    from appliance.engine.process.residency import Residency
    from appliance.engine.process.supervisor import ProgressCallback
    from appliance.model_files.sampling_defaults import SamplingDefaults
    from appliance.server.models.model_state import FoundModel, ModelToServe
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


ReadyCallback = Callable[[RunningServer], object]


def run_server(
    settings: Settings,
    found: Sequence[ModelToServe | MissingModel],
    *,
    on_progress: ProgressCallback,
    on_ready: ReadyCallback,
    engine_command: Sequence[str] = ENGINE_COMMAND,
    launched: LaunchedProcess | None = None,
    warnings: RecentWarnings | None = None,
    notice: ServiceNotice | None = None,
) -> int:
    """Serve until a signal ends it.

    SIGTERM, SIGINT and SIGHUP drain running streams; a second signal ends at once.

    Args:
        found: the models of `settings.served`; loads the first that loads now, others on request,
            missing ones as soon as they can be had.
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
        EngineError: a part without which it cannot serve has failed for good.
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
    found: Sequence[ModelToServe | MissingModel],
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
        first = next((one for one in found if not isinstance(one, MissingModel)), None)
        files: FoundModel | MissingModel
        for model, of in zip(settings.served, found, strict=True):
            if isinstance(of, MissingModel):
                files, name, local, card = of, of.name, of.engine, None
            else:
                files, name = of.model, model.name or of.model.name
                local, card = of.local_engine, of.quality_card

            def make(
                engine: EngineConfig,
                memory: Residency,
                place: int,
                replica: Replica | None,
                *,
                name: str = name,
                is_first: bool = of is first,
            ) -> EngineClient:
                return EngineClient(
                    engine,
                    command=engine_command,
                    launched=launched if is_first and place == 0 else None,
                    idle_timeout=config.idle_timeout,
                    residency=memory,
                    name=name if replica is None else f"replica {place} of {name}",
                    replica=replica,
                    on_lost=partial(state.fail, f"the supervision of {name}"),
                )

            engine = make_engine(local, memories, make)
            state.models.append(ModelState(state, engine, files, name, quality_card=card))
        state.check_names()
        yield ApiServer(state, sock, certificate, notice or ServiceNotice())


def _allow_descriptors(connections: int) -> None:
    """Raise the limit of open files for that many connections, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * connections + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


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
        self._stop_now = asyncio.Event()

    async def run(
        self, on_progress: ProgressCallback, on_ready: ReadyCallback, *, signals: bool = True
    ) -> None:
        """Serve until `stop`, or a signal if `signals`.

        Raises:
            ApplianceError: no model loads, or a part failed for good that it cannot do without.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if signals else ():
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves SIGHUP
                loop.add_signal_handler(number, self.stop)
        first = next((one for one in self.state.models if not one.is_missing), self.state.default)
        await first.engine.prepare()
        loading = asyncio.create_task(self._load(on_progress))
        web = await asyncio.to_thread(self._web_server)  # in parallel with the engine's start
        state = self.state
        lost = partial(state.fail, "the web server")
        serving = start_task(partial(web.serve, sockets=[self._socket]), "web-server", lost)
        lasting = [start_task(partial(self._notice.watch, self._is_alive), "service-watchdog")]
        if self._certificate is not None:
            lasting.append(start_task(self._certificate.follow, "certificate"))
        stopping = asyncio.create_task(state.ending.wait())
        try:
            await _first_of(loading, stopping)
            if loading.done():
                on_ready(loading.result())
                names = ", ".join(model.model_id for model in self.state.models)
                self._notice.ready(f"serving {names} at {self._url}")
                await stopping
                await self._drain()
        finally:
            state.draining = state.closing = True
            for task in (loading, stopping, *lasting):
                task.cancel()
            await asyncio.gather(loading, stopping, *lasting, return_exceptions=True)
            now = self._stop_now.is_set()
            await asyncio.gather(*(model.close(now=now) for model in self.state.models))
            web.stop(now=self._stop_now.is_set())
            await serving
            self.state.texts.close()
        if state.failure is not None:
            raise state.failure

    def _web_server(self) -> WebServer:
        from appliance.server.web_server import WebServer  # slow to import

        return WebServer.of(self.state, self._certificate)

    async def _load(self, on_progress: ProgressCallback) -> RunningServer:
        """Load the first model that loads.

        Raises:
            ApplianceError: none does; the message has each one's reason, the class the first's.
        """
        failures: list[ApplianceError] = []
        for model in self.state.models:
            if model.is_missing:  # was sought a moment ago
                continue
            try:
                info = await model.begin_loading(on_progress)
            except ApplianceError as error:
                if len(self.state.models) > 1:
                    logger.error("%s cannot be loaded: %s", model.model_id, error)
                    error.args = (f"{model.model_id}: {error}", *error.args[1:])
                failures.append(error)
                continue
            self.state.is_up = True
            _, tokenizer = model.serving()
            return RunningServer(
                self._url,
                model.model_id,
                msgspec.structs.replace(info, notes=(*info.notes, *tokenizer.notes)),
                tokenizer.chat_template is not None,
                model.sampling,
                tuple(one.model_id for one in self.state.models if one is not model),
                len(model.engine.replicas),
            )
        failures += [
            ModelError(f"{model.model_id}: {model.engine.reason}")
            for model in self.state.models
            if model.is_missing
        ]
        raise none_can_be_had(failures)

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
        if self.state.ending.is_set():
            self._stop_now.set()
        self.state.ending.set()


def none_can_be_had(failures: Sequence[ApplianceError]) -> ApplianceError:
    """Return the error of a server without any model, of the first failure's class."""
    error = failures[0]
    if len(failures) > 1:
        reasons = "; ".join(map(str, failures))
        error.args = (f"none of the {len(failures)} models can be served: {reasons}",)
    return error


async def _first_of(*tasks: asyncio.Task[Any]) -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
