"""Captures a step's work on a GPU as one graph, or as graphs between calls of the host."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.engine.run.device import Graph


class OpenCapture:
    """A capture under way, in parts between calls of the host."""

    def __init__(self, pool: Any, stream: torch.cuda.Stream) -> None:
        self._pool = pool
        self._stream = stream
        self._parts: list[Graph] = []
        self._part = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(self, *error: Any) -> None:
        self._part.__exit__(*error)

    @property
    def whole(self) -> Graph:
        return self._parts[0] if len(self._parts) == 1 else _Parts(tuple(self._parts))

    def cut(self, call: Callable[[], None]) -> None:
        self._part.close()
        self._parts.append(_HostCall(call))
        self._begin()

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        self._part.enter_context(
            torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            )
        )
        self._parts.append(graph)


@dataclass(frozen=True, slots=True)
class _HostCall:
    """A part of captured work that the host does itself."""

    replay: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Parts:
    parts: tuple[Graph, ...]

    def replay(self) -> None:
        for part in self.parts:
            part.replay()
