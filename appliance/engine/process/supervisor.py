"""Keeps one engine process alive: starts it, notices when it dies or hangs, starts another.

Knows processes and reports, not requests; those belong to the client.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from appliance.engine.messages import Failed, Load, Progress, Ready, StepReport
from appliance.engine.process.child import ENGINE_COMMAND, EngineProcess
from appliance.engine.process.framing import FrameError
from appliance.errors import (
    ApplianceError,
    ConfigError,
    EngineDiedError,
    EngineError,
    EngineUnavailableError,
    MemoryPlanError,
    ModelError,
)

if TYPE_CHECKING:
    from appliance.engine.messages import EngineInfo, FromEngine, ToEngine

ProgressCallback = Callable[[str, int, int], None]

_TICKS_PER_TIMEOUT = 4

logger = logging.getLogger(__name__)


class EngineState(Enum):
    """What the engine process is doing."""

    LOADING = "loading"  # for the first time
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"  # and will not be started again
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class SupervisionLimits:
    """When to give up on a process, and on restarting; times in seconds."""

    step_timeout: float = 60.0  # without a report while there is work
    max_deaths: int = 3
    death_window: float = 300.0
    backoff: float = 1.0  # before the second restart in the window, then twice as long, ...


class Supervisor:
    """One engine process at a time.

    Args:
        command: starts a process; see `entry.run_engine_process` for what is added to it.
        limits: when to give up.
        on_report: gets every report of the engine.
        on_death: a process ended; the error says how. Another may follow.
        on_ready: a restarted engine accepts requests.
        on_failure: there will be no other process; the error says why.
        is_busy: whether the engine has been given work that is not finished.
    """

    def __init__(
        self,
        command: Sequence[str] = ENGINE_COMMAND,
        limits: SupervisionLimits | None = None,
        *,
        on_report: Callable[[StepReport], None],
        on_death: Callable[[EngineDiedError], None],
        on_ready: Callable[[], None],
        on_failure: Callable[[EngineUnavailableError], None],
        is_busy: Callable[[], bool],
    ) -> None:
        self.state = EngineState.LOADING
        self.reason = ""
        self.restarts = 0
        self.info: EngineInfo | None = None
        self.process: EngineProcess | None = None
        self._command = command
        self._limits = limits or SupervisionLimits()
        self._on_report = on_report
        self._on_death = on_death
        self._on_ready = on_ready
        self._on_failure = on_failure
        self._is_busy = is_busy
        self._deaths: deque[float] = deque()
        self._heard = False
        self._task: asyncio.Task[None] | None = None

    async def prepare(self) -> None:
        """Start a process ahead of `start`, so that it imports while the rest is made ready."""
        if self.process is None:
            self.process = await EngineProcess.spawn(self._command)

    async def start(self, load: Load, on_progress: ProgressCallback) -> EngineInfo:
        """Load the model for the first time.

        Raises:
            ApplianceError: the engine cannot be loaded, with the exit code it gave.
        """
        try:
            info = await self._load(load, on_progress)
        except BaseException as error:
            self.reason = str(error)
            self.state = EngineState.FAILED
            if self.process is not None:
                self.process.kill()
                await self.process.wait()
            raise
        self._task = asyncio.create_task(self._keep_alive(load), name="engine-supervisor")
        return info

    def send(self, message: ToEngine) -> None:
        """Send to the engine, if there is one."""
        if self.process is not None:
            self.process.connection.send(message)

    async def close(self, *, now: bool = False) -> None:
        """End the process, after its step unless `now`, and start no other."""
        was_ready = self.state is EngineState.READY
        self.state = EngineState.STOPPED
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.process is not None:
            if now or not was_ready:
                self.process.kill()  # loading may take long
            await self.process.stop()
            self.process = None

    async def _load(self, load: Load, on_progress: ProgressCallback) -> EngineInfo:
        await self.prepare()
        assert self.process is not None
        self.process.connection.send(load)
        while message := await self.process.connection.receive():
            match message:
                case Progress(stage, done, total):
                    on_progress(stage, done, total)
                case Failed(text, exit_code):
                    await self.process.wait()
                    raise _failure(text, exit_code)
                case Ready(info):
                    self.info = info
                    self.state = EngineState.READY
                    self.reason = ""
                    return info
                case StepReport():
                    raise FrameError("a step report before the engine was ready")
        how = await self.process.wait()
        raise EngineDiedError(
            f"the engine process {how} while it loaded the model; the log says more, and a process "
            "that was killed by SIGKILL may have run out of memory"
        )

    async def _keep_alive(self, load: Load) -> None:
        try:
            while True:
                error = await self._serve()
                # The state comes first: whoever hears of the death must not submit to the dead.
                self.state = EngineState.RESTARTING
                self.reason = str(error)
                self._on_death(error)
                await self._restart(load, error)
                logger.info("the engine is back, restart %d", self.restarts)
                self._on_ready()
        except ApplianceError as error:
            self._fail(str(error))
        except Exception as error:
            logger.exception("the supervision of the engine failed")
            self._fail(f"the supervision of the engine failed: {error!r}")

    async def _restart(self, load: Load, error: EngineDiedError) -> None:
        """Start processes until one is ready.

        Raises:
            ApplianceError: there were too many deaths, or the model cannot be loaded again.
        """
        while True:
            logger.error("%s", error)
            deaths = self._count_death()
            if deaths >= self._limits.max_deaths:
                window = self._limits.death_window
                raise EngineError(f"{error}; {deaths} ends in {window:.0f} s, so it stays down")
            await asyncio.sleep(self._limits.backoff * (2 ** (deaths - 1) - 1))
            self.restarts += 1
            self.process = None
            try:
                await self._load(load, lambda stage, done, total: None)
            except EngineDiedError as death:
                error = death
            else:
                return

    async def _serve(self) -> EngineDiedError:
        """Pass on reports until the process ends."""
        assert self.process is not None
        watch = asyncio.create_task(self._watch(self.process), name="engine-watchdog")
        trouble = ""
        try:
            await self.process.connection.pass_on(self._take)
        except FrameError as error:
            trouble = f" after it sent {error}"
            self.process.kill()
        finally:
            watch.cancel()
        return EngineDiedError(f"the engine process {await self.process.wait()}{trouble}")

    def _take(self, message: FromEngine) -> None:
        if not isinstance(message, StepReport):
            raise FrameError(f"a {type(message).__name__} while serving")
        self._heard = True
        self._on_report(message)

    async def _watch(self, process: EngineProcess) -> None:
        """Kill a process that has work and reports nothing for too long."""
        silent_ticks = 0
        while silent_ticks <= _TICKS_PER_TIMEOUT:
            await asyncio.sleep(self._limits.step_timeout / _TICKS_PER_TIMEOUT)
            silent_ticks = 0 if self._heard or not self._is_busy() else silent_ticks + 1
            self._heard = False
        timeout = self._limits.step_timeout
        logger.error("no step for %.1f s with work to do: ending the engine", timeout)
        process.dump_stacks()
        await asyncio.sleep(min(1.0, timeout / _TICKS_PER_TIMEOUT))
        process.kill()

    def _count_death(self) -> int:
        """Note a death; how many there were lately."""
        now = time.monotonic()
        self._deaths.append(now)
        while now - self._deaths[0] > self._limits.death_window:
            self._deaths.popleft()
        return len(self._deaths)

    def _fail(self, reason: str) -> None:
        logger.error("the engine is not started again: %s", reason)
        if self.process is not None:
            self.process.kill()
        self.state = EngineState.FAILED
        self.reason = reason
        self._on_failure(EngineUnavailableError(reason))


def _failure(text: str, exit_code: int) -> ApplianceError:
    """The error of the class that has this exit code."""
    for kind in (ConfigError, ModelError, MemoryPlanError):
        if kind.exit_code == exit_code:
            return kind(text)
    return EngineError(text)
