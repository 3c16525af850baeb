"""The served model's quality card, already read and validated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from appliance.events import QualityFact


@dataclass(frozen=True, slots=True)
class ServedCard:
    """The quality card of the served weights.

    Attributes:
        facts: its figures, for dashboards and metrics.
    """

    as_json: bytes
    facts: tuple[QualityFact, ...]
