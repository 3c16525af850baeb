"""Looks at an engine process periodically and ends a hung one; `watch` judges."""

from __future__ import annotations

import logging
from asyncio import sleep
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from appliance.engine.process.watch import Verdict, Watch, read_signs
from appliance.long_lived import start_task

if TYPE_CHECKING:
    from appliance.engine.process.child import EngineProcess
    from appliance.engine.process.restarts import SupervisionLimits

logger = logging.getLogger(__name__)


class Watchdog:
    """Watches one process at a time.

    Attributes:
        verdict: on the current or last process.
    """

    def __init__(self, limits: SupervisionLimits) -> None:
        self.verdict = Verdict.ALIVE
        self.responsive = True
        self._limits = limits
        self._heard = False

    def hear(self) -> None:
        """Take a message as a sign of life."""
        self._heard = True

    @contextmanager
    def over(
        self, process: EngineProcess, *, busy: Callable[[], bool], look: float
    ) -> Iterator[None]:
        """Watch a process.

        Args:
            look: seconds between looks.
        """
        self.verdict = Verdict.ALIVE
        task = start_task(partial(self._watch, process, busy, look), "engine-watchdog")
        try:
            yield
        finally:
            task.cancel()

    async def _watch(self, process: EngineProcess, busy: Callable[[], bool], look: float) -> None:
        watch = Watch(patience=round(self._limits.step_timeout / self._limits.look))
        read = partial(read_signs, process.pid, process.beacon)
        while self.verdict in (Verdict.ALIVE, Verdict.DOUBTFUL):
            await sleep(look)
            heard, self._heard = self._heard, False
            before = self.verdict
            try:
                self.verdict = watch.look(heard=heard, busy=busy(), read=read)
            except Exception:
                logger.exception("looking at the engine process failed; the next look tries again")
                continue
            self.responsive = self.verdict is Verdict.ALIVE
            if self.verdict is not before:
                logger.warning("the engine process: %s", self.verdict.value)
        logger.error("the engine process %s: it is ended", self.verdict.value)
        try:
            process.dump_stacks()
            await sleep(min(1.0, look))
        finally:
            process.kill()
