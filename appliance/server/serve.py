"""The API process from start to end: listen, start the engine, serve, drain, leave."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import uvicorn
import uvloop

from appliance.config import jobs_dir
from appliance.engine.process.client import EngineClient
from appliance.engine.process.launch import ENGINE_COMMAND
from appliance.engine.process.supervisor import EngineState
from appliance.errors import EngineUnavailableError
from appliance.log import RecentWarnings, Sparing
from appliance.sampling_defaults import choose_defaults
from appliance.server.certificate import Certificate
from appliance.server.connection import protocol_of
from appliance.server.listener import bind, url_of
from appliance.server.memory import settle
from appliance.server.metrics import Metrics
from appliance.server.state import ServerState
from appliance.service.notice import ServiceNotice
from appliance.tokenizer import Tokenizer

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from appliance.config import Settings
    from appliance.engine.messages import EngineInfo
    from appliance.engine.process.launch import LaunchedProcess
    from appliance.engine.process.supervisor import ProgressCallback
    from appliance.sampling_defaults import SamplingDefaults
    from appliance.server.quality import ServedCard

KEEP_ALIVE_SECONDS = 30  # for connections without a request
_CLOSE_SECONDS = 2  # for responses that have just been ended

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that has begun to serve.

    Attributes:
        url: where it listens.
        name: id of the model in the API.
        info: what was loaded.
        chats: whether the model has a chat template.
        sampling: what counts where a request says nothing.
    """

    url: str
    name: str
    info: EngineInfo
    chats: bool
    sampling: SamplingDefaults


ReadyCallback = Callable[[RunningServer], object]


class FoundModel(Protocol):
    """A model on this machine."""

    @property
    def path(self) -> Path:
        """File or folder."""
        ...

    @property
    def name(self) -> str:
        """The model's name unless the settings give one."""
        ...

    @property
    def sampling(self) -> SamplingDefaults:
        """Recommended sampling for a model that brings none."""
        ...


def run_server(
    settings: Settings,
    model: FoundModel,
    *,
    on_progress: ProgressCallback,
    on_ready: ReadyCallback,
    quality_card: ServedCard | None = None,
    engine_command: Sequence[str] = ENGINE_COMMAND,
    launched: LaunchedProcess | None = None,
    warnings: RecentWarnings | None = None,
    notice: ServiceNotice | None = None,
) -> int:
    """Serve until a signal ends it.

    SIGTERM and SIGINT let streams in flight finish for a while; a second signal ends at once.

    Args:
        on_progress: called with stage, done, total while the model loads.
        on_ready: called once requests are accepted.
        quality_card: of the model, if it has one.
        engine_command: starts the engine process.
        launched: the first one, if it was started already.
        warnings: what the log keeps for dashboards.
        notice: tells the service manager; None if there is none.

    Returns:
        How many requests came to their end.

    Raises:
        ConfigError: the address cannot be had, or a certificate cannot be used.
        ApplianceError: the model cannot be loaded.
    """
    config = settings.server
    certificate = Certificate(config.tls_cert, config.tls_key) if config.tls_cert else None
    sock = bind(config)
    _allow_descriptors(config.max_connections)
    with sock:
        engine_config = msgspec.structs.replace(settings.engine, model=str(model.path))
        engine = EngineClient(
            engine_config,
            command=engine_command,
            launched=launched,
            idle_timeout=config.idle_timeout,
        )
        name = config.served_model_name or model.name
        state = ServerState(
            config,
            engine,
            name,
            Metrics(name),
            warnings=warnings or RecentWarnings(),
            quality_card=quality_card,
            jobs_folder=jobs_dir(),
        )
        server = _Server(settings, model, state, sock, certificate, notice or ServiceNotice())
        uvloop.run(server.run(on_progress, on_ready))
    return server.num_finished


class _Server:
    """One run of the API process."""

    def __init__(
        self,
        settings: Settings,
        model: FoundModel,
        state: ServerState,
        sock: socket.socket,
        certificate: Certificate | None,
        notice: ServiceNotice,
    ) -> None:
        self._model = model
        self._generation_config = settings.engine.generation_config
        self._engine = state.engine
        self._socket = sock
        self._certificate = certificate
        self._url = url_of(settings.server, sock)
        self._state = state
        self._notice = notice
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    @property
    def num_finished(self) -> int:
        """Requests that came to their end, well or not."""
        return self._state.metrics.finished

    async def run(self, on_progress: ProgressCallback, on_ready: ReadyCallback) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        # The engine's process imports for a while; everything else is done meanwhile.
        await self._engine.prepare()
        web = self._web_server()
        following = asyncio.create_task(self._certificate.follow()) if self._certificate else None
        serving = asyncio.create_task(web.serve(sockets=[self._socket]))
        loading = asyncio.create_task(self._load(on_progress))
        stopping = asyncio.create_task(self._stop.wait())
        watching = asyncio.create_task(self._notice.watch(self._is_alive))
        try:
            await _first_of(loading, stopping, serving)
            if loading.done():
                on_ready(loading.result())
                self._notice.ready(f"serving {self._state.model_id} at {self._url}")
                await _first_of(stopping, serving)
                await self._drain()
        finally:
            self._state.draining = self._state.closing = True
            for task in (loading, stopping, watching):
                task.cancel()
            if following is not None:
                following.cancel()
            await asyncio.gather(loading, stopping, watching, return_exceptions=True)
            await self._engine.close(now=self._stop_now.is_set())
            web.stop(now=self._stop_now.is_set())
            await serving
            self._state.text_pool.shutdown(wait=False, cancel_futures=True)
            if self._state.tokenizer is not None:
                self._state.tokenizer.close()
            self._state.grammars.close()

    def _web_server(self) -> _WebServer:
        from appliance.server.app import create_app  # slow to import

        certificate = self._certificate
        log = logging.getLogger("uvicorn")
        log.handlers[:] = logging.getLogger("appliance").handlers
        log.setLevel(logging.WARNING)
        logging.getLogger("uvicorn.error").filters[:] = [Sparing()]  # strangers make it speak
        return _WebServer(
            uvicorn.Config(
                create_app(self._state),
                http=protocol_of(self._state.config.max_connections),  # type: ignore[arg-type]
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_CLOSE_SECONDS,
                ssl_context_factory=None if certificate is None else lambda *_: certificate.context,
            )
        )

    async def _load(self, on_progress: ProgressCallback) -> RunningServer:
        tokenizer = await asyncio.to_thread(Tokenizer.from_path, self._model.path)
        info, _ = await asyncio.gather(
            self._engine.start(tokenizer.eos_token_ids, on_progress),
            asyncio.to_thread(tokenizer.isolate_template),
        )
        self._state.sampling = choose_defaults(
            self._generation_config, tokenizer.sampling, self._model.sampling
        )
        self._state.tokenizer = tokenizer
        settle()
        return RunningServer(
            self._url,
            self._state.model_id,
            info,
            tokenizer.chat_template is not None,
            self._state.sampling,
        )

    async def _drain(self) -> None:
        """Refuse new requests, and give those in flight time to end."""
        self._state.draining = True
        self._notice.stopping()
        if self._engine.num_running + self._engine.num_waiting:
            logger.info("finishing requests in flight; another signal ends at once")
        end = asyncio.get_running_loop().time() + self._state.config.drain_timeout
        while self._engine.num_running + self._engine.num_waiting:
            if self._stop_now.is_set() or asyncio.get_running_loop().time() > end:
                break
            await asyncio.sleep(0.05)
        self._engine.fail_all(EngineUnavailableError("the server is shutting down"))

    def _is_alive(self) -> bool:
        """Return False if the engine has work and does nothing; its supervisor should end it."""
        return self._engine.state is not EngineState.READY or self._engine.responsive

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()


class _WebServer(uvicorn.Server):
    """Leaves signals to `_Server`, and looks at the clock once a second, not ten times."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopping = asyncio.Event()

    def stop(self, *, now: bool) -> None:
        """End connections: `now`, or after their responses."""
        self.should_exit, self.force_exit = True, now
        self._stopping.set()

    async def main_loop(self) -> None:
        """Renew the Date header until told to stop; an idle server wakes up for nothing else."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), 1.0)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _allow_descriptors(connections: int) -> None:
    """Raise the limit of open files for that many connections, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * connections + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


async def _first_of(*tasks: asyncio.Task[Any]) -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
