"""The waiting queue: a lane per owner and priority, and the accounts by which owners take turns.

Waiting sequences have no blocks. An account counts the tokens computed for its owner; see
`policy.turn`. Imports no torch.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from appliance.engine.scheduling.policy import WINDOW, choose_waiting, rank

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from appliance.engine.nouns.sequence import Sequence


class WaitingQueue:
    """Lanes of waiting sequences, with parked siblings.

    Siblings share their parent's prompt, so they queue only once it is computed.

    Attributes:
        parked: siblings by parent.
    """

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._lanes: dict[tuple[int, str], Lane] = {}  # none is empty
        self._num_queued = 0
        self.parked: dict[Sequence, list[Sequence]] = {}

    def __len__(self) -> int:
        return self._num_queued + sum(map(len, self.parked.values()))

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.queued()
        for siblings in self.parked.values():
            yield from siblings

    def queued(self) -> Iterator[Sequence]:
        for lane in self._lanes.values():
            yield from lane.sequences

    def lanes(self) -> Collection[tuple[tuple[int, str], Lane]]:
        """List the non-empty lanes by priority and owner."""
        return self._lanes.items()

    def push(self, sequence: Sequence) -> None:
        account = self._accounts.of(sequence)
        key = (sequence.request.priority, sequence.request.owner)
        if key not in self._lanes:
            self._lanes[key] = Lane(account)
        self._lanes[key].add(sequence)
        account.num_waiting += 1
        self._num_queued += 1

    def remove(self, sequence: Sequence) -> None:
        parent = sequence.parent
        if parent is not None and sequence in self.parked.get(parent, ()):
            self.parked[parent].remove(sequence)
            return
        key = (sequence.request.priority, sequence.request.owner)
        lane = self._lanes[key]
        lane.remove(sequence)
        if not lane.sequences:
            del self._lanes[key]
        lane.account.num_waiting -= 1
        self._num_queued -= 1

    def park(self, parent: Sequence, siblings: list[Sequence]) -> None:
        """Keep siblings until their parent's prompt is computed."""
        self.parked[parent] = siblings

    def unpark(self, parent: Sequence) -> None:
        """Queue a sequence's siblings once its prompt is computed, or never will be."""
        if parent in self.parked:
            for sibling in self.parked.pop(parent):
                self.push(sibling)


@dataclass(slots=True, eq=False)
class Lane:
    """An owner's waiting sequences of one priority, in rank order."""

    account: Account
    sequences: list[Sequence] = field(default_factory=list)
    # Cached until something changes, because choosing is slow.
    _next: Sequence | None = None
    _briefest: Sequence | None = None

    def add(self, sequence: Sequence) -> None:
        insort(self.sequences, sequence, key=rank)
        self._next = self._briefest = None

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self.sequences, rank(sequence), key=rank)
        assert self.sequences[index] is sequence
        del self.sequences[index]
        self._next = self._briefest = None

    def next(self, num_cached: Callable[[Sequence], int]) -> Sequence:
        """Return the sequence to start next, without removing it."""
        if self._next is None:
            self._next = choose_waiting(self.sequences[:WINDOW], num_cached)
        return self._next

    def briefest(self, num_left: Callable[[Sequence], int]) -> Sequence:
        """Return the sequence with the fewest tokens left to read, without removing it."""
        if self._briefest is None:
            self._briefest = min(self.sequences[:WINDOW], key=num_left)
        return self._briefest

    def overtake(self, sequence: Sequence) -> None:
        """Count that a sequence starts before earlier ones."""
        for other in self.sequences[:WINDOW]:
            if other is sequence:
                return
            other.num_overtaken += 1


class Accounts:
    """All owners with live sequences; forgets others."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}

    def of(self, sequence: Sequence) -> Account:
        """Return the account of a live sequence's owner."""
        return self._accounts[sequence.request.owner]

    def open(self, owner: str, num_sequences: int) -> None:
        """Add an owner's new sequences; if none of its waited, level it with the others."""
        account = self._accounts.setdefault(owner, Account())
        account.num_live += num_sequences
        if account.num_waiting == 0:
            others = [one.served for one in self._accounts.values() if one is not account]
            account.served = max(account.served, min(others, default=0))

    def close(self, sequence: Sequence) -> None:
        account = self.of(sequence)
        account.num_live -= 1
        if account.num_live == 0:
            del self._accounts[sequence.request.owner]

    def charge(self, scheduled: Iterable[Sequence]) -> None:
        accounts = self._accounts
        for sequence in scheduled:
            accounts[sequence.request.owner].served += 1

    def refund(self, given: Mapping[Sequence, int], scheduled: Collection[Sequence]) -> None:
        """Refund tokens of sequences that are not scheduled after all."""
        for sequence, num_tokens in given.items():
            if sequence not in scheduled:
                self.of(sequence).served -= num_tokens

    def check_invariants(
        self, live: list[Sequence], waiting: list[Sequence], running: list[Sequence]
    ) -> None:
        """Assert that the numbers match the live, waiting (no siblings) and running sequences."""
        for owner, account in self._accounts.items():
            assert account.num_live == sum(s.request.owner == owner for s in live) > 0
            assert account.num_waiting == sum(s.request.owner == owner for s in waiting)
            assert account.num_running == sum(s.request.owner == owner for s in running)
        assert {sequence.request.owner for sequence in live} == self._accounts.keys()


@dataclass(slots=True, eq=False)
class Account:
    """One owner with live sequences.

    Attributes:
        served: tokens computed for it; raised when it returns after a pause, so that idle owners do
            not save up credit.
        num_waiting: those that wait, without siblings of waiting ones.
    """

    served: int = 0
    num_live: int = 0
    num_waiting: int = 0
    num_running: int = 0
