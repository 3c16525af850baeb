"""The API process from start to end: listen, start the engine, serve, drain, leave."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import uvicorn
import uvloop

from appliance.config import jobs_dir
from appliance.engine.process.child import ENGINE_COMMAND
from appliance.engine.process.client import EngineClient
from appliance.errors import EngineUnavailableError
from appliance.log import RecentWarnings, Sparing
from appliance.sampling_defaults import choose_defaults
from appliance.server.certificate import Certificate
from appliance.server.connection import protocol_of
from appliance.server.listener import bind, url_of
from appliance.server.memory import settle
from appliance.server.metrics import Metrics
from appliance.server.state import ServerState
from appliance.tokenizer import Tokenizer

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from appliance.config import Settings
    from appliance.engine.messages import EngineInfo
    from appliance.engine.process.supervisor import ProgressCallback
    from appliance.sampling_defaults import SamplingDefaults
    from appliance.server.quality import ServedCard

KEEP_ALIVE_SECONDS = 30  # for connections without a request
_CLOSE_SECONDS = 2  # for responses that have just been ended

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ready:
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


ReadyCallback = Callable[[Ready], object]


class FoundModel(Protocol):
    """A model on this machine."""

    @property
    def path(self) -> Path:
        """File or folder."""
        ...

    @property
    def name(self) -> str:
        """What it is called, unless the settings say otherwise."""
        ...

    @property
    def sampling(self) -> SamplingDefaults:
        """What is recommended for it, where it does not say so itself."""
        ...


def run_server(
    settings: Settings,
    model: FoundModel,
    *,
    on_progress: ProgressCallback,
    on_ready: ReadyCallback,
    quality_card: ServedCard | None = None,
    engine_command: Sequence[str] = ENGINE_COMMAND,
    warnings: RecentWarnings | None = None,
) -> int:
    """Serve until a signal ends it.

    SIGTERM and SIGINT let streams in flight finish for a while; a second signal ends at once.

    Args:
        settings: of engine and server.
        model: what to serve.
        on_progress: called with stage, done, total while the model loads.
        on_ready: called once requests are accepted.
        quality_card: of the model, if it has one.
        engine_command: starts the engine process.
        warnings: what the log keeps for dashboards.

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
        engine = EngineClient(engine_config, command=engine_command)
        server = _Server(
            settings, model, engine, sock, certificate, warnings or RecentWarnings(), quality_card
        )
        uvloop.run(server.run(on_progress, on_ready))
    return server.num_finished


class _Server:
    """One run of the API process."""

    def __init__(
        self,
        settings: Settings,
        model: FoundModel,
        engine: EngineClient,
        sock: socket.socket,
        certificate: Certificate | None,
        warnings: RecentWarnings,
        quality_card: ServedCard | None,
    ) -> None:
        self._model = model
        self._generation_config = settings.engine.generation_config
        self._engine = engine
        self._socket = sock
        self._certificate = certificate
        self._url = url_of(settings.server, sock)
        name = settings.server.served_model_name or model.name
        self._state = ServerState(
            settings.server,
            engine,
            name,
            Metrics(name),
            warnings=warnings,
            quality_card=quality_card,
            jobs_folder=jobs_dir(),
        )
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
        try:
            await _first_of(loading, stopping, serving)
            if loading.done():
                on_ready(loading.result())
                await _first_of(stopping, serving)
                await self._drain()
        finally:
            self._state.draining = self._state.closing = True
            loading.cancel()
            stopping.cancel()
            if following is not None:
                following.cancel()
            await asyncio.gather(loading, stopping, return_exceptions=True)
            await self._engine.close(now=self._stop_now.is_set())
            web.should_exit = True
            web.force_exit = self._stop_now.is_set()
            await serving
            self._state.text_pool.shutdown(wait=False, cancel_futures=True)
            if self._state.tokenizer is not None:
                self._state.tokenizer.close()
            self._state.grammars.close()

    def _web_server(self) -> uvicorn.Server:
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

    async def _load(self, on_progress: ProgressCallback) -> Ready:
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
        return Ready(
            self._url,
            self._state.model_id,
            info,
            tokenizer.chat_template is not None,
            self._state.sampling,
        )

    async def _drain(self) -> None:
        """Take nothing new, and give what is in flight some time."""
        self._state.draining = True
        if self._engine.num_running + self._engine.num_waiting:
            logger.info("finishing requests in flight; another signal ends at once")
        end = asyncio.get_running_loop().time() + self._state.config.drain_timeout
        while self._engine.num_running + self._engine.num_waiting:
            if self._stop_now.is_set() or asyncio.get_running_loop().time() > end:
                break
            await asyncio.sleep(0.05)
        self._engine.fail_all(EngineUnavailableError("the server is shutting down"))

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()


class _WebServer(uvicorn.Server):
    """Leaves signals to `_Server`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _allow_descriptors(connections: int) -> None:
    """Room for that many connections, as far as the system gives it; 1024 is usual, and close."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * connections + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


async def _first_of(*tasks: asyncio.Task[Any]) -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
