"""Arrays of NumPy and of torch that the CPU library reads."""

from __future__ import annotations

import numpy as np
import torch

from appliance.kernels import arrays


def test_what_is_joined_is_contiguous_also_if_it_is_one_part() -> None:
    """The library reads its memory row by row, whatever the part was cut from."""
    whole = arrays.of_numpy(np.arange(24, dtype=np.float32).reshape(2, 6, 2))
    for array in (whole, torch.from_numpy(np.asarray(whole))):
        (alone, both) = (arrays.cat([array[:, 1:3]] * count, dim=1) for count in (1, 2))
        for found in (alone, both):
            assert np.asarray(found).flags["C_CONTIGUOUS"]
        assert np.array_equal(np.asarray(alone), np.asarray(whole)[:, 1:3])
