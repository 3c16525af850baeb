"""Chooses the replica for a request: the one whose cache knows its prompt, within a bound on load.

It remembers the chained block hashes of the prompts that each replica was given, which are those of
the prefix cache, and as many as fit into that cache. Knows nothing of processes, time or asyncio.
Imports no torch.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.engine.blocks.block_hashes import chain_root, extend_chain

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from appliance.engine.request import Request

# A replica is passed over while it has more sequences than so many times those of the least loaded
# one, and so many more. A few sequences cost a step little, and a lost prefix is computed again.
FACTOR = 1.5
SLACK = 4


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """The work of a replica.

    Attributes:
        sequences: that it runs, or that wait for it.
        is_awake: it has a process that takes requests now.
    """

    sequences: int = 0
    is_awake: bool = True


def bound(least: int) -> int:
    """Return the most sequences that a replica has when it gets one more for its cache.

    Args:
        least: sequences of the replica that has fewest.
    """
    return int(FACTOR * least) + SLACK


class ReplicaRouter:
    """Routes the requests of one model.

    A prompt that goes on where one of a replica's prompts ended goes to that replica. A prompt that
    parts from all of them begins something new: it goes where there is room for it in the cache,
    then where there is least to do, then where most of it is known.
    """

    def __init__(self, num_replicas: int) -> None:
        self._records = [KnownPrompts() for _ in range(num_replicas)]
        self._given = [0] * num_replicas  # when each was chosen last
        self._block_size = 0

    def begin(self, replica: int, num_blocks: int, block_size: int) -> None:
        """Note that a replica begins with an empty cache of so many blocks; 0 if it has none.

        What a disk tier brings back is not counted: the replicas share that folder.
        """
        self._records[replica] = KnownPrompts(num_blocks)
        self._block_size = block_size

    def known(self, replica: int) -> int:
        """Return the number of blocks that a replica is thought to have."""
        return len(self._records[replica])

    def route(self, request: Request, loads: Sequence[ReplicaLoad | None]) -> int:
        """Choose a replica for a request that it will get.

        Args:
            loads: of each replica; None takes no requests. At least one does.
        """
        hashes = self.hashes(request)
        able = {replica: load for replica, load in enumerate(loads) if load is not None}
        most = bound(min(load.sequences for load in able.values()))
        within = {replica: load for replica, load in able.items() if load.sequences <= most}

        def preference(replica: int) -> tuple[bool, int, bool, int, int, int]:
            record, load = self._records[replica], within[replica]
            num_known = record.match(hashes)
            goes_on = record.is_end(hashes, num_known)
            return (
                load.is_awake,
                num_known if goes_on else 0,
                record.has_room(len(hashes) - num_known),
                -load.sequences,
                num_known,
                -self._given[replica],
            )

        chosen = max(within, key=preference)
        self._records[chosen].add(hashes)
        self._given[chosen] = 1 + max(self._given)
        return chosen

    def hashes(self, request: Request) -> list[bytes]:
        """Return the hashes of a prompt's full blocks."""
        size = self._block_size
        if not size or not any(record.capacity for record in self._records):
            return []
        found: list[bytes] = []
        num_blocks = len(request.prompt_token_ids) // size
        extend_chain(found, chain_root(request), request.prompt_token_ids, size, num_blocks)
        return found


class KnownPrompts:
    """The blocks of the prompts that one replica was given, those used last.

    The first blocks of a prompt are forgotten after those that follow them, as in the cache.

    Args:
        capacity: most blocks.
    """

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        self._parents: OrderedDict[bytes, bytes] = OrderedDict()  # by hash, used last at the end
        self._followers: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._parents)

    def match(self, hashes: Iterable[bytes]) -> int:
        """Return how many of a prompt's first blocks are known."""
        count = 0
        for content in hashes:
            if content not in self._parents:
                break
            count += 1
        return count

    def is_end(self, hashes: Sequence[bytes], num_known: int) -> bool:
        """Return True if a prompt is all known, or goes on where another one ended."""
        if num_known == len(hashes):
            return True
        return bool(num_known) and not self._followers[hashes[num_known - 1]]

    def has_room(self, num_blocks: int) -> bool:
        """Return True if so many blocks more displace none."""
        return len(self) + num_blocks <= self.capacity

    def add(self, hashes: Sequence[bytes]) -> None:
        """Note a prompt; what was used longest ago is forgotten."""
        kept = hashes[: self.capacity]
        for parent, content in zip((b"", *kept), kept, strict=False):
            if content not in self._parents:
                self._parents[content] = parent
                self._followers[parent] += 1
        for content in reversed(kept):
            self._parents.move_to_end(content)
        while len(self) > self.capacity:
            content, parent = self._parents.popitem(last=False)
            self._followers[parent] -= 1
            if not self._followers[parent]:
                del self._followers[parent]
