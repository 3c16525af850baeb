"""The penalties of every row of a step, as tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

# Added in a table of seen tokens if the token is in the prompt; the rest counts it in the answer.
IN_PROMPT = 1 << 30


@dataclass(frozen=True, slots=True)
class PenaltyRows:
    """Settings of each row, all (num_rows,) and on the device of the logits."""

    places: Tensor  # int32, the row's place in the table of seen tokens; -1 without penalties
    counted: Tensor  # int32, 1 if the token that the row has read is not counted yet, else 0
    repetition: Tensor  # float32: divides positive logits, multiplies others
    presence: Tensor  # float64, subtracted once from tokens in the answer
    frequency: Tensor  # float64, subtracted for each occurrence


class Penalize(Protocol):
    """Applies penalties without waiting for the device; see `reference.penalize`."""

    def __call__(
        self,
        logits: Tensor,
        seen: Tensor,
        rows: PenaltyRows,
        token_ids: Tensor,
        *,
        is_counted: bool = False,
    ) -> None: ...
