"""Counts the tokens computed per owner, for fair turns (`policy.turn`). Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from appliance.engine.nouns.sequence import Sequence


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
