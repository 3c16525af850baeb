"""People with each kind of colour deficiency can distinguish the colours."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from appliance.tui import palette

Array = NDArray[np.float64]

# Machado, Oliveira and Fernandes (2009), severity 1.0, on linear RGB.
SIMULATIONS = {
    "none": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
XYZ = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
)
WHITE = XYZ @ np.ones(3)


def lab(color: str, simulation: Array) -> Array:
    """CIE L*a*b* of #rrggbb as a person with a deficiency sees it."""
    srgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    xyz = XYZ @ np.clip(simulation @ linear, 0, 1) / WHITE
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("deficiency", SIMULATIONS)
@pytest.mark.parametrize(
    "colors",
    [
        (*palette.OWNER_HUES, palette.FREE, palette.CACHED, palette.SHARED),
        (
            palette.FREE,
            palette.CACHED,
            palette.ACTIVE,
            palette.SHARED,
            palette.WRITING,
            palette.SWAPPED,
        ),
        (*palette.OWNER_HUES, palette.FREE, palette.CACHED, palette.SHARED, palette.SWAPPED),
        (palette.FREE, palette.CACHED, *palette.REFERENCE_STEPS),
    ],
    ids=["owner", "state", "swapped", "references"],
)
def test_colours_of_one_mode_are_told_apart(colors: tuple[str, ...], deficiency: str) -> None:
    seen = {color: lab(color, SIMULATIONS[deficiency]) for color in colors}
    for one, other in combinations(colors, 2):
        distance = float(np.linalg.norm(seen[one] - seen[other]))
        assert distance >= 16, f"{one} and {other} are {distance:.1f} apart"


def test_states_and_reference_counts_get_lighter() -> None:
    for colors in (
        (palette.BACKGROUND, palette.FREE, palette.CACHED, palette.ACTIVE, palette.SHARED),
        palette.REFERENCE_STEPS,
    ):
        lightness = [float(lab(color, SIMULATIONS["none"])[0]) for color in colors]
        assert all(b - a >= 9 for a, b in pairwise(lightness))


def test_mixing() -> None:
    assert palette.mix("#000000", "#ffffff", 0.5) == "#808080"
    assert palette.mix("#102030", "#ffffff", 0.0) == "#102030"
    assert palette.dimmed(palette.BACKGROUND) == palette.BACKGROUND
