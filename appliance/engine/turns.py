"""How a step's prompt rows are divided: in turns, by priority and owner. Imports no torch.

Whose turn it is and how large one may be says `policy`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from appliance.engine.policy import TURNS, turn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from appliance.engine.fairness import Account, Accounts
    from appliance.engine.sequence import Sequence
    from appliance.engine.waiting import Lane


@dataclass(slots=True, eq=False)
class Line:
    """What one owner wants at one priority: rows of running prompts, and to start others."""

    priority: int
    account: Account
    prompts: list[tuple[Sequence, int]] = field(default_factory=list)  # the next one last
    lane: Lane | None = None

    def key(self) -> tuple[int, int, int]:
        """The lowest goes next."""
        return turn(self.priority, self.account)


def lines_of(
    prompts: Iterable[tuple[Sequence, int]],
    lanes: Iterable[tuple[tuple[int, str], Lane]],
    accounts: Accounts,
) -> list[Line]:
    """Everyone who wants prompt rows.

    Args:
        prompts: running sequences in the order of rank, each with the rows it wants.
        lanes: of waiting ones, by priority and owner.
        accounts: of all owners.
    """
    lines: dict[tuple[int, str], Line] = {}
    for sequence, wanted in prompts:
        key = (sequence.request.priority, sequence.request.owner)
        if key not in lines:
            lines[key] = Line(key[0], accounts.of(sequence))
        lines[key].prompts.append((sequence, wanted))
    for line in lines.values():
        line.prompts.reverse()
    for key, lane in lanes:
        if key not in lines:
            lines[key] = Line(key[0], lane.account)
        lines[key].lane = lane
    return list(lines.values())


def share_rows(
    rows: int, lines: list[Line], start: Callable[[Lane], Sequence | None]
) -> dict[Sequence, int]:
    """Divide rows among prompts, and charge their owners for them.

    Args:
        rows: how many there are.
        lines: who wants some; used up.
        start: starts one of the waiting sequences of a lane, or says that none can.

    Returns:
        Rows of each sequence, at least 1.
    """
    given: dict[Sequence, int] = {}
    portion = max(1, rows // TURNS)
    while rows and lines:
        line = lines[0] if len(lines) == 1 else min(lines, key=Line.key)
        if not line.prompts:
            sequence = None if line.lane is None else start(line.lane)
            if sequence is None:
                lines.remove(line)
                continue
            line.prompts.append((sequence, sequence.num_uncomputed))
        sequence, wanted = line.prompts.pop()
        taken = min(wanted, rows if len(lines) == 1 else min(portion, rows))
        given[sequence] = given.get(sequence, 0) + taken
        line.account.served += taken
        rows -= taken
        if taken < wanted:
            line.prompts.append((sequence, wanted - taken))
    return given
