"""The quality card that a server shows; who starts the server has read and checked it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from appliance.events import QualityFact


@dataclass(frozen=True, slots=True)
class ServedCard:
    """What quantizing the weights of the served model cost.

    Attributes:
        as_json: the whole card.
        facts: its figures, for dashboards and metrics.
    """

    as_json: bytes
    facts: tuple[QualityFact, ...]
