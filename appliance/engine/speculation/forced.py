"""Proposes the tokens that a grammar forces. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.engine.speculation.proposal import Proposal

if TYPE_CHECKING:
    from collections.abc import Sequence as Ordered

    from appliance.engine.grammars.matchers import Matchers
    from appliance.engine.nouns.sequence import Sequence


class ForcedProposer:
    """Asks the grammars; shares `matchers` with the sampler."""

    def __init__(self, matchers: Matchers) -> None:
        self._matchers = matchers

    def propose(self, answers: Ordered[tuple[Sequence, int]]) -> dict[Sequence, Proposal]:
        found = {}
        for sequence, most in answers:
            if sequence.request.sampling.grammar is not None:
                forced = self._matchers.forced(sequence)
                if forced:
                    found[sequence] = Proposal(tuple(forced[:most]), "forced")
        return found

    def end(self, sequence: Sequence) -> None:
        """Do nothing: the grammars forget by themselves."""
