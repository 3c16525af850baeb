"""The formats in which the numbers of a recurrent state are kept between steps."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class StateFormat(Enum):
    """Storage format of a recurrent state; all arithmetic is done in float32."""

    FP32 = "fp32"
    FP16 = "fp16"  # saturated: what exceeds its range becomes its largest number
    BF16 = "bf16"

    @property
    def num_bytes(self) -> int:
        return 4 if self is StateFormat.FP32 else 2

    @property
    def dtype(self) -> torch.dtype:
        import torch

        return {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[self.value]
