"""Nouns that pass between a front and the chooser of its replicas. Imports no Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ChosenReplica:
    """A replica that takes requests.

    Attributes:
        name: Ray's id of it.
        url: of its server, for other machines.
    """

    name: str
    url: str


@dataclass(slots=True)
class Asked:
    """A request that needs a replica.

    Attributes:
        hashes: of the text of its prompt.
        num_open: requests of this front that each replica has.
        tried: names of the replicas that did not answer it.
    """

    hashes: list[bytes]
    num_open: Counter[str]
    tried: set[str] = field(default_factory=set)


# Returns None if all replicas were tried; raises TimeoutError if there is none for long.
Choose = Callable[[Asked], Coroutine[Any, Any, ChosenReplica | None]]
