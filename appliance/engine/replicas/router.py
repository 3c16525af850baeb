"""Chooses the replica for a request: the one whose cache knows its prompt, within a bound on load.

It remembers the chained block hashes of the prompts that each replica was given, as many as fit
into its cache. On one box they are those of the prefix cache; in a cluster, those of the text.
Knows nothing of processes, time or asyncio. Imports no torch.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from appliance.engine.blocks.block_hashes import chain_root, extend_chain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from appliance.engine.request import Request

NameT = TypeVar("NameT", bound=Hashable)

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


class ReplicaRouter(Generic[NameT]):
    """Routes the requests of one model; replicas have names of any kind, and may come and go.

    A prompt that goes on where one of a replica's prompts ended goes to that replica. A prompt that
    parts from all of them begins something new: it goes where there is room for it in the cache,
    then where there is least to do, then where most of it is known.
    """

    def __init__(self) -> None:
        self._records: dict[NameT, KnownPrompts] = {}
        self._given: dict[NameT, int] = {}  # when each was chosen last
        self._latest = 0

    def begin(self, replica: NameT, num_blocks: int) -> None:
        """Note that a replica begins with an empty cache of so many blocks; 0 if it has none.

        What a disk tier brings back is not counted: the replicas share that folder.
        """
        self._records[replica] = KnownPrompts(num_blocks)

    def end(self, replica: NameT) -> None:
        """Forget a replica that is gone."""
        self._records.pop(replica, None)
        self._given.pop(replica, None)

    @property
    def uses_hashes(self) -> bool:
        """True if a replica has a cache."""
        return any(record.capacity for record in self._records.values())

    def known(self, replica: NameT) -> int:
        """Return the number of blocks that a replica is thought to have."""
        return len(self._records[replica])

    def route(self, hashes: Sequence[bytes], loads: Mapping[NameT, ReplicaLoad]) -> NameT:
        """Choose a replica for a request that it will get.

        Args:
            hashes: of its prompt's full blocks, chained.
            loads: of the replicas that take requests; at least one. All have begun.
        """
        most = bound(min(load.sequences for load in loads.values()))
        within = {replica: load for replica, load in loads.items() if load.sequences <= most}

        def preference(replica: NameT) -> tuple[bool, int, bool, int, int, int]:
            record, load = self._records[replica], within[replica]
            num_known = record.match(hashes)
            goes_on = record.is_end(hashes, num_known)
            return (
                load.is_awake,
                num_known if goes_on else 0,
                record.has_room(len(hashes) - num_known),
                -load.sequences,
                num_known,
                -self._given.get(replica, 0),
            )

        chosen = max(within, key=preference)
        self._records[chosen].add(hashes)
        self._latest += 1
        self._given[chosen] = self._latest
        return chosen


def prompt_hashes(request: Request, block_size: int) -> list[bytes]:
    """Return the hashes of a prompt's full blocks, those of the prefix cache."""
    found: list[bytes] = []
    num_blocks = len(request.prompt_token_ids) // block_size
    extend_chain(found, chain_root(request), request.prompt_token_ids, block_size, num_blocks)
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

    def match(self, hashes: Sequence[bytes]) -> int:
        """Return how many of a prompt's first blocks are known.

        A block is never forgotten before those that follow it, so halving finds the last one.
        """
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in self._parents:
                low = middle + 1
            else:
                high = middle
        return low

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
