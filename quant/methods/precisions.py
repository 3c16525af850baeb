"""Keeps the result of `--mixed` for resumed runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from appliance.errors import ConfigError
from appliance.files import replace_atomically
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.methods.mixed import choose_precisions

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from appliance.model.source import ModelSource
    from appliance.quant.run.options import QuantizeOptions
    from appliance.quant.text.calibration import Calibration

Schemes = dict[str, WeightScheme | None]  # of linear weights by name; None keeps 16 bits
FILE = "precisions.json"


def mixed_schemes(
    source: ModelSource, options: QuantizeOptions, calibration: Calibration, dtype: torch.dtype
) -> Schemes:
    """Choose schemes by sensitivity for `options.mixed` bits per weight.

    Raises:
        ConfigError: the scheme is FP8, or the budget is below the smallest precision.
    """
    assert options.mixed is not None
    if not isinstance(options.scheme, WeightScheme):
        raise ConfigError("--mixed chooses among integers of 3, 4 and 8 bits; use another --method")
    return choose_precisions(source, calibration.rows, options.scheme, options.mixed, dtype)


def kept_schemes(
    source: ModelSource,
    options: QuantizeOptions,
    calibration: Calibration,
    dtype: torch.dtype,
    state: Path,
) -> Schemes:
    """Return the schemes of an earlier run, or choose with `mixed_schemes` and keep them.

    `state` is the folder of this run's state.

    Raises:
        ConfigError: see `mixed_schemes`.
        OSError: the choice cannot be written.
    """
    path = state / FILE
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=Schemes)
    chosen = mixed_schemes(source, options, calibration, dtype)
    with replace_atomically(path) as temporary:
        temporary.write_bytes(msgspec.json.encode(chosen))
    return chosen
