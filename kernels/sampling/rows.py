"""The sampling settings of every row of a step, as tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Settings of each row, all (num_rows,) and on the device of the logits.

    A row's token is a pure function of its logits and settings: the randomness arrives as one
    uniform number per row.
    """

    temperature: Tensor  # float32, 0 is greedy
    top_k: Tensor  # int64, 0 keeps all
    top_p: Tensor  # float32
    min_p: Tensor  # float32
    uniform: Tensor  # float64 in [0, 1)

    @classmethod
    def of(
        cls,
        temperature: list[float],
        top_k: list[int],
        top_p: list[float],
        min_p: list[float],
        uniform: list[float],
        *,
        device: torch.device | None = None,
    ) -> SamplingRows:
        """Build them from host lists."""
        import torch

        return cls(
            temperature=torch.tensor(temperature, dtype=torch.float32, device=device),
            top_k=torch.tensor(top_k, dtype=torch.int64, device=device),
            top_p=torch.tensor(top_p, dtype=torch.float32, device=device),
            min_p=torch.tensor(min_p, dtype=torch.float32, device=device),
            uniform=torch.tensor(uniform, dtype=torch.float64, device=device),
        )

    def select(self, index: Tensor) -> SamplingRows:
        """Return the settings of some rows; index is (k,) int64."""
        return SamplingRows(
            temperature=self.temperature[index],
            top_k=self.top_k[index],
            top_p=self.top_p[index],
            min_p=self.min_p[index],
            uniform=self.uniform[index],
        )
