"""Exposes an engine process's state, as its supervisor knows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from appliance.engine.nouns.messages import EngineInfo
    from appliance.engine.process.engine_state import EngineState
    from appliance.engine.process.restarts import Wakes
    from appliance.engine.process.supervisor import Supervisor


class SupervisedEngine:
    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    @property
    def state(self) -> EngineState:
        return self._supervisor.state

    @property
    def reason(self) -> str:
        """The cause, if the engine failed or is restarting."""
        return self._supervisor.reason

    @property
    def responsive(self) -> bool:
        """True if a ready process shows signs of life."""
        return self._supervisor.responsive

    @property
    def seconds_to_start(self) -> float:
        """Seconds until the next process starts; 0 if none is due."""
        return self._supervisor.seconds_to_start

    @property
    def restarts(self) -> int:
        """Number of processes started after the first."""
        return self._supervisor.restarts

    @property
    def wakes(self) -> Wakes:
        return self._supervisor.wakes

    @property
    def info(self) -> EngineInfo | None:
        """Facts about the loaded engine; the last known ones while it restarts or sleeps."""
        return self._supervisor.info

    @property
    def pid(self) -> int | None:
        process = self._supervisor.process
        return None if process is None else process.pid

    @property
    def metadata(self) -> memoryview | None:
        """(num_blocks,) 64-bit words of block metadata, live."""
        process, info = self._supervisor.process, self._supervisor.info
        return None if process is None or info is None else process.metadata[: info.num_blocks]
