"""Describes an engine process among others of the same model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from appliance.engine.process.quarantine import Quarantine, mark_of

if TYPE_CHECKING:
    from appliance.engine.nouns.request import Request
    from appliance.engine.process.generation import Generation


@dataclass(frozen=True, slots=True)
class Replica:
    """One process of a model; by default the only one.

    Attributes:
        copies: number of processes that divide the same memory.
        gpu: index or id of its own GPU; empty if it sees all.
        quarantine: shared by all, because a request that kills one kills the next.
        hand_over: offers a request that it has not started to the others; False if none takes it.
    """

    copies: int = 1
    gpu: str = ""
    quarantine: Quarantine[Request] = field(default_factory=lambda: Quarantine(mark_of))
    hand_over: Callable[[Generation], bool] = lambda generation: False
