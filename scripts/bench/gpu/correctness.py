"""Check every kernel against its torch reference on the same device before anything is timed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.gpu import kernel_checks, layer_checks, reruns
from bench.gpu.plan import Amount

if TYPE_CHECKING:
    from bench.gpu.plan import Wanted
    from bench.gpu.rows import Rows

# Triton's interpreter takes seconds for each of the others.
TRIED = (
    "packed_matmul 4 bits g128 rows 1", "fp8_matmul fp8 rows 9", "kv_write int8", "kv_seal",
    "block_copy", "add_norm", "gated_activation", "soft_cap", "penalties",
    "token_mask", "grouped_matmul int4 rows 1", "selective_scan", "adapters rows 3",
    "sampling, temperature 0.0",
)  # fmt: skip
# Finds the error and the bound that it must keep.
Check = Callable[[], tuple[float, float]]


def measure(rows: Rows, wanted: Wanted) -> None:
    """Run every check, then the reruns."""
    device = rows.bench.device
    for name, check in (*kernel_checks.all_checks(device), *layer_checks.all_checks(device)):
        if name in wanted.only or (
            not wanted.only and (wanted.amount is not Amount.TINY or name in TRIED)
        ):
            rows.note({"kernel": name, "who": "ours"}, partial(judged, check))
    for name, again in reruns.all_reruns(rows.bench, wanted.amount):
        if not wanted.only or name in wanted.only:
            rows.note({"kernel": name, "who": "ours"}, again)


def judged(check: Check) -> dict[str, Any]:
    """Return a row of the result."""
    error, bound = check()
    found: dict[str, Any] = {"error": float(f"{error:.3g}"), "error_bound": float(f"{bound:.3g}")}
    if not error <= bound:  # also if it is NaN
        found["failed"] = f"the result is wrong: error {error:.3g}, bound {bound:.3g}"
    return found
