"""Puts proposers and the controller together: the drafts of each step. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.engine.speculation.controller import Controller
from appliance.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence as Ordered

    from appliance.engine.grammars.matchers import Matchers
    from appliance.engine.plan import StepLoad
    from appliance.engine.request import Request
    from appliance.engine.sequence import Sequence
    from appliance.engine.speculation.proposal import Proposal, Proposer


class Speculator:
    """Asks proposers in turn for the drafts of a step.

    Args:
        proposers: the first that proposes something for a sequence is heard.
        matchers: the grammars' states; drafts end where a grammar does not allow them.
        most: drafts of one sequence in a step.
        asked_for: the setting that asked for it, in words; empty where it is only welcome.
    """

    def __init__(
        self, proposers: Ordered[Proposer], matchers: Matchers, most: int, *, asked_for: str = ""
    ) -> None:
        self.controller = Controller()
        self._asked_for = asked_for
        self._proposers = tuple(proposers)
        self._matchers = matchers
        self._most = most

    def propose(
        self, answers: Ordered[tuple[Sequence, int, int]], room: int
    ) -> dict[Sequence, tuple[int, ...]]:
        """See `Speculates`."""
        acceptance = self.controller.acceptance
        asked = []
        for sequence, _, most in answers:
            acceptance.learn(sequence)
            if most > 0:
                asked.append((sequence, min(most, self._most)))
        proposals: dict[Sequence, Proposal] = {}
        for proposer in self._proposers:
            if not asked:
                break
            proposals |= proposer.propose(asked)
            asked = [one for one in asked if one[0] not in proposals]
        if not proposals:
            return {}
        proposals = self._allowed(proposals)
        for sequence, proposal in proposals.items():
            acceptance.watch(sequence, proposal)
        own_rows = sum([rows for _, rows, _ in answers])
        chosen = self.controller.choose(proposals, own_rows, len(answers), room)
        return {
            sequence: proposals[sequence].token_ids[:count] for sequence, count in chosen.items()
        }

    def check(self, request: Request) -> None:
        """Refuse beam search where speculation was asked for by name.

        Raises:
            RequestError: which of several beams goes on is not known before all are read.
        """
        if self._asked_for and request.sampling.use_beam_search:
            raise RequestError(
                f"beam search cannot be speculated on, and this engine runs with "
                f"{self._asked_for}; leave use_beam_search out, or start it with --speculate auto,"
                " which runs beams without drafts",
                param="use_beam_search",
            )

    def observe(self, load: StepLoad, seconds: float) -> None:
        """See `Speculates`."""
        self.controller.observe(load, seconds)

    def end(self, sequence: Sequence) -> None:
        """See `Speculates`."""
        self.controller.acceptance.end(sequence)
        for proposer in self._proposers:
            proposer.end(sequence)

    def _allowed(self, proposals: dict[Sequence, Proposal]) -> dict[Sequence, Proposal]:
        """Cut proposals where a grammar does not allow them."""
        found = {}
        for sequence, proposal in proposals.items():
            if sequence.request.sampling.grammar is not None:
                trimmed = self._matchers.trim(sequence, proposal.token_ids)
                proposal = proposal._replace(token_ids=trimmed)
            if proposal.token_ids:
                found[sequence] = proposal
        return found
