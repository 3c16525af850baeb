"""Names the two ways to multiply rows of prompts that are worth timing, see `gpu.timed`.

A choice with a tile is the int8 matmul, one without is the linear in 16 bits. Imports no triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from appliance.kernels.gpu.timed import LaunchChoice
from appliance.kernels.int8_matmul.tiles import ENTRIES, LEAST_ROWS, int8_tile
from appliance.kernels.packed_matmul.timed_linear import TimedLinear

if TYPE_CHECKING:
    from appliance.kernels.gpu.timed import TimedChoices
    from appliance.kernels.int8_matmul.launch import PromptLinear


@dataclass(frozen=True, slots=True)
class TimedPrompts:
    """A linear whose rows all belong to prompts; see `Timeable`. Entries are rows of x."""

    linear: PromptLinear

    @property
    def name(self) -> str:
        return f"{TimedLinear(self.linear.linear).name}, prompts in int8"

    @property
    def has_splits(self) -> bool:
        return False

    def entries(self, most_rows: int) -> tuple[int, ...]:
        reached = (LEAST_ROWS - 1, *ENTRIES)
        return tuple(rows for before, rows in pairwise(reached) if before < most_rows)

    def candidates(self, entry: int, best: LaunchChoice | None = None) -> tuple[LaunchChoice, ...]:
        both = LaunchChoice(int8_tile(entry)), LaunchChoice()
        device = self.linear.linear.weight.codes.device
        return both if self.linear.computes_gain(entry, device) else both[::-1]

    def library_rows(self, most_rows: int) -> tuple[int, ...]:
        return ()

    def use(self, timed: TimedChoices) -> None:
        self.linear.linear.prompts.take(timed)

    def inputs(self, entry: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        return (torch.randn(entry, self.linear.in_features, dtype=dtype, device=device),)

    def run(self, *inputs: Any) -> object:
        return self.linear(*inputs)
