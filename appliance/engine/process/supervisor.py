"""Keeps one engine process alive: starts it, notices when it dies or hangs, starts another.

Never gives up: it retries repeated failures at growing intervals, with the reason visible. Knows
processes and reports; requests belong to the client.
"""

from __future__ import annotations

import asyncio
import logging
import time
from asyncio import sleep
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from appliance.engine.nouns.messages import (
    EndTokens,
    Load,
    MemoryPlanned,
    Proceed,
    Progress,
    Ready,
    Shutdown,
    StartFailed,
    StepReport,
    WeightsRead,
)
from appliance.engine.process.child import EngineProcess
from appliance.engine.process.framing import FrameError
from appliance.engine.process.launch import ENGINE_COMMAND
from appliance.engine.process.watchdog import LOOKS_TO_HANG, Verdict, Watchdog
from appliance.errors import (
    ApplianceError,
    ConfigError,
    EngineDiedError,
    EngineError,
    EngineUnavailableError,
    MemoryPlanError,
    ModelError,
)
from appliance.long_lived import start_task
from appliance.progress import stages

if TYPE_CHECKING:
    from appliance.engine.nouns.messages import EngineInfo, FromEngine, ToEngine
    from appliance.engine.process.launch import LaunchedProcess


ProgressCallback = Callable[[str, int, int], None]
MakeLoad = Callable[[], Load]
AskEndTokens = Callable[[], Awaitable[tuple[int, ...]]]
SHORT = 5.0  # maximum seconds for which requests wait for the next process
logger = logging.getLogger(__name__)


class EngineState(Enum):
    """The states of an engine, as clients see them."""

    LOADING = "loading"  # for the first time
    READY = "ready"
    RESTARTING = "restarting"
    ASLEEP = "asleep"  # without a process, or its process is ending; a request starts another
    WAKING = "waking"  # a process loads after sleep
    FAILED = "failed"  # the first load failed: nothing to serve
    STOPPED = "stopped"

    @property
    def accepts(self) -> bool:
        """True if it accepts requests: it runs, or a request wakes it."""
        return self in (EngineState.READY, EngineState.ASLEEP, EngineState.WAKING)


class Wakes(NamedTuple):
    """Number of wakes after sleep, and the last one's seconds."""

    number: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SupervisionLimits:
    """Limits on restarting a process, in seconds."""

    hang_timeout: float = 8.0  # for a process with work that does nothing
    step_timeout: float = 60.0  # for a process that computes without progress
    backoff: float = 1.0  # before the second restart in the window, then 3, 7, ...
    max_backoff: float = 60.0
    death_window: float = 600.0

    @property
    def look(self) -> float:
        """Seconds between two looks at the process."""
        return self.hang_timeout / LOOKS_TO_HANG


class Supervisor:
    """Supervises one engine process at a time.

    Args:
        command: starts a process; `worker.run_engine_process` lists the added arguments.
        on_report: called with every report.
        on_death: called with the error when a process ended; another one follows.
        on_ready: called when a restarted engine accepts requests.
        on_outage: called with the error when no process can start soon.
        on_asleep: called when a process has ended for sleep.
        on_planned: called before a process takes memory; the process waits for it.
        on_lost: called with the error when the supervision itself has failed for good.
        is_busy: returns True if the engine has unfinished work.
        launched: the first process, if already started.
    """

    def __init__(
        self,
        command: Sequence[str] = ENGINE_COMMAND,
        limits: SupervisionLimits | None = None,
        *,
        on_report: Callable[[StepReport], None],
        on_death: Callable[[EngineDiedError], None],
        on_ready: Callable[[], None],
        on_outage: Callable[[EngineUnavailableError], None],
        on_asleep: Callable[[], None],
        on_planned: Callable[[MemoryPlanned], Awaitable[None]],
        on_lost: Callable[[Exception | None], object],
        is_busy: Callable[[], bool],
        launched: LaunchedProcess | None = None,
    ) -> None:
        self.state = EngineState.ASLEEP
        self.reason = ""
        self.restarts = 0
        self.wakes = Wakes()
        self.info: EngineInfo | None = None
        self.process: EngineProcess | None = None
        self._command = command
        self._launched = launched
        self._limits = limits or SupervisionLimits()
        self.on_report = on_report
        self.on_death = on_death
        self._on_ready = on_ready
        self._on_outage = on_outage
        self._on_asleep = on_asleep
        self._on_planned = on_planned
        self.on_lost = on_lost
        self._end_tokens: AskEndTokens | None = None
        self._waits_for_us = False
        self._is_busy = is_busy
        self._deaths = Deaths(self._limits)
        self._next_start = 0.0  # monotonic time
        self._watchdog = Watchdog(self._limits)
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def responsive(self) -> bool:
        """True if a ready process shows signs of life."""
        return self._watchdog.responsive

    @property
    def seconds_to_start(self) -> float:
        """Seconds until the next process starts; 0 if none is due."""
        return max(0.0, self._next_start - time.monotonic())

    async def prepare(self) -> None:
        """Start a process before `start`, so that it imports meanwhile."""
        if self.process is not None:
            return
        launched, self._launched = self._launched, None
        if launched is None:
            self.process = await EngineProcess.spawn(self._command)
        else:
            self.process = await EngineProcess.over(launched)

    async def start(
        self, load: MakeLoad, end_tokens: AskEndTokens, on_progress: ProgressCallback
    ) -> EngineInfo:
        """Load the model for the first time.

        Args:
            load: makes the first message to each process.
            end_tokens: returns the tokens that end an answer, for each process.
            on_progress: called with stage, done, total.

        Raises:
            ApplianceError: loading failed; it has the engine's exit code.
        """
        self.state = EngineState.LOADING
        self._end_tokens = end_tokens
        try:
            info = await self._load_watched(load, on_progress)
        except BaseException as error:
            self.reason = str(error)
            self.state = EngineState.FAILED
            await self._end_process()
            self.process = None
            raise
        self._task = start_task(partial(self.keep_alive, load), "engine-supervisor", self._give_up)
        return info

    def lack(self, reason: str) -> None:
        """Note why there is nothing to load yet; `start` tries it."""
        self.state, self.reason = EngineState.FAILED, reason

    def send(self, message: ToEngine) -> None:
        if self.process is not None:
            self.process.connection.send(message)

    def sleep(self) -> None:
        """End an idle process and start none; the process first writes pending blocks to disk.

        Once it has ended, its memory and device context are free.
        """
        if self.state is EngineState.READY and not self._is_busy():
            self.state = EngineState.ASLEEP
            self._woken.clear()
            self.send(Shutdown())

    def wake(self) -> None:
        """Start a process again after `sleep`."""
        self._woken.set()

    async def close(self, *, now: bool = False) -> None:
        """End the process, after its step unless `now`, and start no other."""
        was_ready = self.state in (EngineState.READY, EngineState.ASLEEP)
        self.state = EngineState.STOPPED
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.process is not None:
            if now or not was_ready or not self.responsive:
                self.process.kill()  # loading can take long
            await self.process.stop()
            self.process = None

    async def _end_process(self) -> None:
        if self.process is not None:
            self.process.kill()
            await self.process.wait()

    async def _load(self, load: MakeLoad, on_progress: ProgressCallback) -> EngineInfo:
        await self.prepare()
        assert self.process is not None
        self.process.connection.send(load())
        while message := await self.process.connection.receive():
            self._watchdog.hear()
            match message:
                case Progress(stage, done, total):
                    on_progress(stage, done, total)
                case MemoryPlanned():
                    self._waits_for_us = True
                    await self._on_planned(message)
                    self._waits_for_us = False
                    self.send(Proceed())
                case WeightsRead():
                    assert self._end_tokens is not None
                    self._waits_for_us = True
                    ids = await self._end_tokens()
                    self._waits_for_us = False
                    self.send(EndTokens(ids))
                case StartFailed(text, exit_code):
                    await self.process.wait()
                    raise _failure(text, exit_code)
                case Ready(info):
                    self.info = info
                    self.state = EngineState.READY
                    self._watchdog.responsive = True
                    self.reason = ""
                    return info
                case StepReport():
                    raise FrameError("a step report before the engine was ready")
        how = await self.process.wait()
        raise EngineDiedError(
            f"the engine process {how} while it loaded the model; the log says more, and a process "
            "that was killed by SIGKILL may have run out of memory"
        )

    async def keep_alive(self, load: MakeLoad) -> None:
        """Supervise the process, and each that takes its place, until cancelled."""
        while True:
            try:
                await self._serve_once(load)
            except Exception as error:
                logger.exception("supervising the engine failed; another process is started")
                self.state = EngineState.RESTARTING
                self._tell_outage(error)
                await self._end_process()
                await self._restart(load, error)
                self._on_ready()

    def _give_up(self, error: Exception | None) -> None:
        """End what nobody supervises any more: the process, its requests and the owner."""
        self.state = EngineState.FAILED
        try:
            if self.process is not None:
                self.process.kill()
            self._tell_outage(error or EngineError("its supervision ended"), "is lost")
        finally:
            self.on_lost(error)

    async def _serve_once(self, load: MakeLoad) -> None:
        """Serve with one process until it has ended, then sleep or start the next."""
        error = await self._serve()
        if self.state is EngineState.ASLEEP:
            await self._sleep(load)
            return
        # Set the state first: on_death must not submit to the dead process.
        self.state = EngineState.RESTARTING
        self.reason = str(error)
        self.on_death(error)
        await self._restart(load, error)
        logger.info("the engine is back, restart %d", self.restarts)
        self._on_ready()

    async def _sleep(self, load: MakeLoad) -> None:
        """Wait for `wake`, then start a process for the requests that have arrived."""
        self.process = None
        logger.info("the engine sleeps; the next request wakes it")
        self._on_asleep()
        await self._woken.wait()
        self.state = EngineState.WAKING
        begin = time.monotonic()
        try:
            info = await self._load_watched(load)
        except (ConfigError, ModelError, MemoryPlanError) as error:
            # The model or the memory is at fault: another process would fail too.
            logger.error("the engine cannot wake: %s", error)
            self.state = EngineState.ASLEEP
            self._woken.clear()
            await self._end_process()
            self._tell_outage(error, "cannot wake")
            return
        except Exception as error:
            self.state = EngineState.RESTARTING
            await self._end_process()
            await self._restart(load, error)
        else:
            self.wakes = Wakes(self.wakes.number + 1, time.monotonic() - begin)
            logger.info("the engine woke in %s", stages.in_words(begin, info.stages))
        self._on_ready()

    async def _restart(self, load: MakeLoad, error: Exception) -> None:
        while True:
            delay = self._deaths.count()
            self._next_start = time.monotonic() + delay
            logger.error("%s; the engine is started again%s", error, _when(delay))
            if delay > SHORT:
                self._tell_outage(error)
            await sleep(delay)
            self.restarts += 1
            self.process = None
            try:
                await self._load_watched(load)
            except ApplianceError as failure:
                error = failure
            except Exception as failure:
                logger.exception("the engine could not be started again")
                error = failure
            else:
                return
            await self._end_process()
            self._tell_outage(error)

    def _tell_outage(self, error: Exception, how: str = "is restarting") -> None:
        self.reason = str(error)
        self._on_outage(
            EngineUnavailableError(
                f"the engine {how}: {error}", retry_after=self.seconds_to_start or None
            )
        )

    async def _load_watched(
        self, load: MakeLoad, on_progress: ProgressCallback = lambda stage, done, total: None
    ) -> EngineInfo:
        await self.prepare()
        assert self.process is not None
        self._waits_for_us = False
        with self._watchdog.over(
            self.process, busy=lambda: not self._waits_for_us, look=self._limits.look * 8
        ):
            return await self._load(load, on_progress)

    async def _serve(self) -> EngineDiedError:
        assert self.process is not None
        trouble = ""
        with self._watchdog.over(self.process, busy=self._is_busy, look=self._limits.look):
            try:
                await self.process.connection.pass_on(self._take)
            except FrameError as error:
                trouble = f" after it sent {error}"
                self.process.kill()
            except Exception as error:
                logger.exception("a report of the engine could not be taken")
                trouble = f" after a report that could not be taken: {error!r}"
                self.process.kill()
        how, told = await self.process.wait(), self._watchdog.verdict
        if told not in (Verdict.ALIVE, Verdict.DOUBTFUL):
            trouble = f", as it {told.value}"
        by_itself = self.process.exit_code != 0 and told is not Verdict.STOPPED
        return EngineDiedError(f"the engine process {how}{trouble}", by_itself=by_itself)

    def _take(self, message: FromEngine) -> None:
        if not isinstance(message, StepReport):
            raise FrameError(f"a {type(message).__name__} while serving")
        self._watchdog.hear()
        self.on_report(message)


def _when(delay: float) -> str:
    return f" in {delay:.0f} s" if delay >= 1 else ""


def _failure(text: str, exit_code: int) -> ApplianceError:
    for kind in (ConfigError, ModelError, MemoryPlanError):
        if kind.exit_code == exit_code:
            return kind(text)
    return EngineError(text)


@dataclass(slots=True)
class Deaths:
    """Counts recent deaths and sets the delay before the next start."""

    limits: SupervisionLimits
    clock: Callable[[], float] = time.monotonic
    _times: deque[float] = field(default_factory=lambda: deque(maxlen=64))

    def count(self) -> float:
        """Record a death; return the seconds to wait."""
        now = self.clock()
        self._times.append(now)
        while now - self._times[0] > self.limits.death_window:
            self._times.popleft()
        delay: float = self.limits.backoff * (2 ** (len(self._times) - 1) - 1)
        return min(delay, self.limits.max_backoff)
