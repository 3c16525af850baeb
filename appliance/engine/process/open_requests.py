"""Counts and finds the open requests of an engine process, or of several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from appliance.engine.nouns.request import Request
    from appliance.engine.process.generation import Generation


class OpenRequests(ABC):
    @abstractmethod
    def _open(self) -> Iterable[Generation]: ...

    @property
    def num_waiting(self) -> int:
        """Number of requests that no engine has started."""
        return sum(not one.started for one in self._open())

    @property
    def num_waiting_tokens(self) -> int:
        return sum(len(one.request.prompt_token_ids) for one in self._open() if not one.started)

    def num_waiting_of(self, owner: str) -> int:
        """Count an owner's requests that no engine has started."""
        return sum(not one.started and one.request.owner == owner for one in self._open())

    @property
    def num_running(self) -> int:
        """Number of requests that an engine has started and not finished."""
        return sum(one.started for one in self._open())

    @property
    def num_running_sequences(self) -> int:
        return sum(one.request.sampling.num_sequences for one in self._open() if one.started)

    @property
    def num_sequences(self) -> int:
        return sum(one.request.sampling.num_sequences for one in self._open())

    def owner_of(self, request_id: str) -> str | None:
        for one in self._open():
            if one.request.request_id == request_id:
                return one.request.owner
        return None

    def open_requests(self) -> list[tuple[Request, bool]]:
        """List every open request, with True if an engine has started it."""
        return [(one.request, one.started) for one in self._open()]
