"""GPUs are found by the names that people type; others are told apart from slips of the pen."""

from __future__ import annotations

import pytest

from appliance.engine.memory.known_gpus import counted, gpu_named
from appliance.errors import ConfigError

NAMES = {
    "RTX 3090": ["NVIDIA GeForce RTX 3090", "rtx3090", "3090", "GeForce 3090", "rtx-3090"],
    "RTX 4060 Ti 16GB": ["4060 ti 16gb", "RTX 4060 Ti 16 GB"],
    "RTX 4060 Ti": ["4060ti"],
    "RTX 4070 Ti Super": ["4070 Ti SUPER"],
    "RTX A6000": ["A6000", "NVIDIA RTX A6000"],
    "RTX 6000 Ada": ["RTX 6000 Ada", "6000 ada"],
    "RTX PRO 6000": ["pro 6000"],
    "A100 80GB": ["a100 80gb", "NVIDIA A100-80GB"],
    "L4": ["Tesla L4", "l4"],
}
# Compute capabilities: https://developer.nvidia.com/cuda/gpus and legacy list; 7.5 is Turing.
OLDER = [
    "GTX 1080", "GTX 1080 Ti", "GeForce GTX 1660 Super", "RTX 2080 Ti", "rtx2070", "2060",
    "Tesla T4", "T4", "P40", "Tesla P100", "V100", "Titan RTX", "TITAN V", "Quadro RTX 6000",
    "Quadro RTX 8000", "M40", "K80", "MX450",
]  # fmt: skip
OTHERS = {
    "is AMD's": ["RX 7900 XTX", "Radeon RX 6800", "MI300X", "Strix Halo", "AMD Radeon Pro W7900"],
    "is Apple's": ["M2 Ultra", "M4", "Apple M3 Max", "M1 Pro"],
    "is Intel's": ["Arc A770", "Intel Arc B580", "B580"],
}


@pytest.mark.parametrize(("name", "typed"), [(a, b) for a, every in NAMES.items() for b in every])
def test_a_name_may_be_written_in_any_way(name: str, typed: str) -> None:
    assert gpu_named(typed).name == name


@pytest.mark.parametrize("typed", OLDER)
def test_older_cards_are_said_to_be_older(typed: str) -> None:
    with pytest.raises(ConfigError, match=r"older than compute capability 8\.0.* the CPU of"):
        gpu_named(typed)


@pytest.mark.parametrize(("why", "typed"), [(a, b) for a, every in OTHERS.items() for b in every])
def test_other_makers_cards_are_said_to_be_theirs(why: str, typed: str) -> None:
    with pytest.raises(ConfigError, match=f"{typed} {why}, and is not served"):
        gpu_named(typed)


def test_a_name_of_several_asks_for_one() -> None:
    with pytest.raises(ConfigError, match="'A100' is 'A100 40GB' or 'A100 80GB'; name one"):
        gpu_named("A100")


@pytest.mark.parametrize(("typed", "near"), [("RTX 4091", "RTX 4090"), ("RTX 3095", "RTX 3090")])
def test_an_unknown_gpu_has_a_nearest(typed: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{near}'"):
        gpu_named(typed)
    with pytest.raises(ConfigError, match="'Voodoo 2' is in the table"):
        gpu_named("Voodoo 2")


def test_cards_are_counted() -> None:
    assert counted("2x RTX 3090") == (2, "RTX 3090")
    assert counted("2 x 3090") == (2, "3090")
    assert counted("4x4090") == (4, "4090")
    assert counted("3090") == (1, "3090")
    assert counted("RTX 3090") == (1, "RTX 3090")
