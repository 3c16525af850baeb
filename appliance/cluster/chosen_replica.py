"""Types that pass between a front and its replica chooser. Imports no Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ChosenReplica:
    """A replica that takes requests.

    Attributes:
        url: its server's, for other machines.
    """

    name: str
    url: str


@dataclass(slots=True)
class ReplicaRequest:
    """A request that needs a replica.

    Attributes:
        hashes: of the prompt's text.
        num_open: open requests of this front by replica.
        tried: names of the replicas that failed to answer it.
    """

    hashes: list[bytes]
    num_open: Counter[str]
    tried: set[str] = field(default_factory=set)


# Returns None if all replicas were tried; raises TimeoutError if none appears in time.
Choose = Callable[[ReplicaRequest], Coroutine[Any, Any, ChosenReplica | None]]
