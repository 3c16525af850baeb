"""The API process while it runs: start the engine, serve, drain, exit."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from appliance.errors import ApplianceError, EngineUnavailableError, ModelError
from appliance.long_lived import start_task
from appliance.server.http.listener import url_of

if TYPE_CHECKING:
    import socket

    from appliance.engine.nouns.messages import EngineInfo
    from appliance.engine.process.supervisor import ProgressCallback
    from appliance.model_files.sampling_defaults import SamplingDefaults
    from appliance.server.http.certificate import Certificate
    from appliance.server.models.state import ServerState
    from appliance.server.web_server import WebServer
    from appliance.service.notice import ServiceNotice

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
