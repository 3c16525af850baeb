"""Sampling by the CPU library: one call for all rows of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.kernels import arrays
from appliance.kernels.cpu.step_structs import SamplingStruct
from appliance.kernels.cpu.structs import Status

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.cpu.engine import NativeEngine
    from appliance.kernels.sampling.rows import SamplingRows


class NativeSampling:
    """Chooses tokens as `reference.sample` does, up to float32 rounding of the probabilities.

    Args:
        engine: runs nothing else during a call.
    """

    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine
        # Of the latest rows: consecutive steps often share one object.
        self._last: tuple[SamplingRows, int, SamplingStruct] | None = None

    def __call__(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """Choose one token per row.

        Args:
            logits: (num_rows, vocab_size) float32, contiguous, on the CPU; not changed.
            rows: settings of each row.

        Returns:
            (num_rows,) int64 token ids; -1 for a row with NaN or without a finite value, -2 for one
            with +inf.

        Raises:
            MemoryError: the workspace is beyond the engine's limit or the system's memory.
        """
        num_rows, vocab_size = logits.shape
        last = self._last
        if last is None or last[0] is not rows or last[1] != num_rows:
            self._last = last = rows, num_rows, _struct(rows, num_rows)
        tokens: Tensor = arrays.empty(num_rows, "int64", logits)
        status = self._engine.library.ap_sample(
            self._engine.handle,
            _address(logits, "float32", num_rows),
            num_rows,
            vocab_size,
            last[2],
            tokens.data_ptr(),
        )
        if status == Status.NO_MEMORY:
            raise MemoryError(f"no workspace to sample {num_rows} rows of {vocab_size} logits")
        assert status == Status.OK, f"ap_sample returned {Status(status).name}"
        return tokens


def _struct(rows: SamplingRows, num_rows: int) -> SamplingStruct:
    return SamplingStruct(
        temperature=_address(rows.temperature, "float32", num_rows),
        top_k=_address(rows.top_k, "int64", num_rows),
        top_p=_address(rows.top_p, "float32", num_rows),
        min_p=_address(rows.min_p, "float32", num_rows),
        uniform=_address(rows.uniform, "float64", num_rows),
    )


def _address(values: Tensor, dtype: str, num_rows: int) -> int:
    assert arrays.dtype_name(values.dtype) == dtype, f"{values.dtype} where {dtype} is read"
    assert not values.is_cuda, "the CPU library reads the memory of the CPU"
    assert values.is_contiguous(), "the CPU library reads element after element"
    assert len(values) == num_rows, f"{len(values)} rows beside {num_rows} of logits"
    return values.data_ptr()
