"""What each owner of requests has been given so far, so that turns can be fair. Imports no torch.

Whose turn it is says `policy.turn`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from appliance.engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class Account:
    """One owner with live sequences.

    Attributes:
        served: tokens computed for it, put forward whenever it comes back after a pause: who asks
            for nothing saves nothing up.
        num_live: sequences that wait or run.
        num_waiting: of these, those that wait; siblings of one that does are not counted.
        num_running: of these, those that run.
    """

    served: int = 0
    num_live: int = 0
    num_waiting: int = 0
    num_running: int = 0


class Accounts:
    """All owners that have live sequences; the others are forgotten."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}

    def of(self, sequence: Sequence) -> Account:
        """The account of a live sequence's owner."""
        return self._accounts[sequence.request.owner]

    def open(self, owner: str, num_sequences: int) -> None:
        """An owner asks for something; if nothing of it waits, it is put level with the others."""
        account = self._accounts.setdefault(owner, Account())
        account.num_live += num_sequences
        if account.num_waiting == 0:
            others = [one.served for one in self._accounts.values() if one is not account]
            account.served = max(account.served, min(others, default=0))

    def close(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        account = self.of(sequence)
        account.num_live -= 1
        if account.num_live == 0:
            del self._accounts[sequence.request.owner]

    def charge(self, scheduled: Iterable[Sequence]) -> None:
        """Count one token for each of some live sequences."""
        accounts = self._accounts
        for sequence in scheduled:
            accounts[sequence.request.owner].served += 1

    def refund(self, given: Mapping[Sequence, int], scheduled: Collection[Sequence]) -> None:
        """Take back what sequences were given that are not scheduled after all."""
        for sequence, num_tokens in given.items():
            if sequence not in scheduled:
                self.of(sequence).served -= num_tokens

    def check_invariants(self, waiting: list[Sequence], running: list[Sequence]) -> None:
        """Assert that the numbers agree with who waits (siblings left out) and runs."""
        for owner, account in self._accounts.items():
            assert account.num_live > 0
            assert account.num_waiting == sum(s.request.owner == owner for s in waiting)
            assert account.num_running == sum(s.request.owner == owner for s in running)
        owners = {sequence.request.owner for sequence in (*waiting, *running)}
        assert owners <= self._accounts.keys()
