"""Chooses a request's replica: the one with its prompt cached, within a bound on load.

Remembers the chained block hashes of each replica's prompts, as many as fit into its cache. On one
box they are the prefix cache's; in a cluster, the text's. Knows nothing of processes, time or
asyncio. Imports no torch.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from appliance.engine.blocks.block_hashes import chain_root, extend_chain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from appliance.engine.nouns.request import Request


NameT = TypeVar("NameT", bound=Hashable)
# Skip a replica with more sequences than FACTOR times the least loaded one's plus SLACK. A few
# sequences cost a step little, while a lost prefix must be recomputed.
FACTOR = 1.5
SLACK = 4


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica's work.

    Attributes:
        sequences: running or waiting.
        is_awake: its process takes requests now.
    """

    sequences: int = 0
    is_awake: bool = True


def bound(least: int) -> int:
    """Return the maximum load up to which a cache attracts requests, given the least load."""
    return int(FACTOR * least) + SLACK


class ReplicaRouter(Generic[NameT]):
    """Routes one model's requests; replicas may come and go, under names of any type.

    A prompt that continues one of a replica's prompts goes to that replica. A prompt that diverges
    from all of them goes where the cache has room, then to the least load, then to the longest
    match.
    """

    def __init__(self) -> None:
        self.records: dict[NameT, KnownPrompts] = {}
        self._given: dict[NameT, int] = {}  # when each was last chosen
        self._latest = 0

    def begin(self, replica: NameT, num_blocks: int) -> None:
        """Register a replica with an empty cache of some blocks; 0 if it has none.

        Ignores content from a disk tier: the replicas share that folder.
        """
        self.records[replica] = KnownPrompts(num_blocks)

    def end(self, replica: NameT) -> None:
        self.records.pop(replica, None)
        self._given.pop(replica, None)

    @property
    def uses_hashes(self) -> bool:
        """True if a replica has a cache."""
        return any(record.capacity for record in self.records.values())

    def known(self, replica: NameT) -> int:
        """Return the number of blocks that a replica is assumed to have."""
        return len(self.records[replica])

    def route(self, hashes: Sequence[bytes], loads: Mapping[NameT, ReplicaLoad]) -> NameT:
        """Choose a replica for a request, and record that it gets it.

        Args:
            hashes: of the prompt's full blocks, chained.
            loads: of the registered replicas that take requests; at least one.
        """
        most = bound(min(load.sequences for load in loads.values()))
        within = {replica: load for replica, load in loads.items() if load.sequences <= most}

        def preference(replica: NameT) -> tuple[bool, int, bool, int, int, int]:
            record, load = self.records[replica], within[replica]
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
        self.records[chosen].add(hashes)
        self._latest += 1
        self._given[chosen] = self._latest
        return chosen


def prompt_hashes(request: Request, block_size: int) -> list[bytes]:
    """Return the prefix cache's hashes of a prompt's full blocks."""
    found: list[bytes] = []
    num_blocks = len(request.prompt_token_ids) // block_size
    extend_chain(found, chain_root(request), request.ids(), block_size, num_blocks)
    return found


class KnownPrompts:
    """The blocks of one replica's prompts, most recently used.

    Forgets a prompt's first blocks after later ones, as the cache does.
    """

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        self._parents: OrderedDict[bytes, bytes] = OrderedDict()  # by hash, most recent last
        self._followers: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._parents)

    def match(self, hashes: Sequence[bytes]) -> int:
        """Count the known leading blocks of a prompt.

        Bisects, because a block is never forgotten before those after it.
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
        """Return True if a prompt is all known, or continues where another one ended."""
        if num_known == len(hashes):
            return True
        return bool(num_known) and not self._followers[hashes[num_known - 1]]

    def has_room(self, num_blocks: int) -> bool:
        """Return True if this many more blocks displace none."""
        return len(self) + num_blocks <= self.capacity

    def add(self, hashes: Sequence[bytes]) -> None:
        """Record a prompt; forget the least recently used blocks."""
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
