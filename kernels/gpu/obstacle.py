"""Decides whether torch can use a GPU of this machine, and words why not and what mends it.

The banner, the log, /health, the dashboard, `doctor` and `--device cuda` all show these words.
"""

from __future__ import annotations

import re
import shlex
import sys
import warnings
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from appliance.kernels.gpu.cards import (
    GpuFacts,
    NvidiaCard,
    as_version,
    read_facts,
    with_kernels,
)
from appliance.runtime import see_gpus, visible_gpus

# https://docs.nvidia.com/cuda/cuda-toolkit-release-notes: a driver runs all versions of CUDA of its
# major number. torch 2.12 and later are built for 12.6 and 13.
_NEW_DRIVER, _NEW_CUDA = 580, (13, 0)
_OLD_CUDA, _OLD_BUILD = (12, 0), (12, 6)
_NEEDED = "use --device cpu, or a card of compute capability 8.0 or later (RTX 30, A100)"
_LOG_OF_KERNEL = "`sudo dmesg | grep -i nvrm` has the kernel's words"


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A reason for which torch can use no GPU that is here.

    Attributes:
        fix: the command or the step that mends it.
    """

    reason: str
    fix: str

    def __str__(self) -> str:
        return f"{self.reason}; {self.fix}"


@dataclass(frozen=True, slots=True)
class GpuUse:
    """The answer to whether torch can compute on a GPU of this machine.

    Attributes:
        is_usable: torch can compute on one.
        obstacle: why none is usable, or which one is left out; None if there is nothing to say.
    """

    is_usable: bool
    obstacle: Obstacle | None = None

    def in_words(self) -> str:
        """Say why a GPU that is here computes nothing, and what mends it; empty if all do."""
        if self.obstacle is None:
            return ""
        return str(self.obstacle) if self.is_usable else f"no GPU is used: {self.obstacle}"

    def refusal(self) -> str:
        """Say why a GPU that was asked for cannot be had."""
        why = self.obstacle or "no NVIDIA GPU was found; check nvidia-smi"
        return f"--device cuda cannot be had: {why}; or use --device cpu"


@lru_cache
def gpu_use() -> GpuUse:
    """Ask torch for a GPU once; imports torch only if one can be usable."""
    return decide(read_facts())


def decide(facts: GpuFacts) -> GpuUse:
    """Decide by the facts, then by torch, from which cards without kernels are hidden."""
    known = without_torch(facts)
    if known is not None or not facts.has_library:
        return GpuUse(False, known)
    left_out = _leave_out(facts)
    said = ask_torch()
    if said is not None:
        return GpuUse(False, without_device(facts, said))
    if (first := _first_device(facts)) is not None:
        return GpuUse(False, first)
    return GpuUse(True, left_out)


def without_torch(facts: GpuFacts) -> Obstacle | None:
    """Return what keeps torch from every GPU, if that is certain before it is asked."""
    if not facts.has_library:
        return _no_library(facts)
    names = ", ".join(map(str, facts.cards))
    if facts.cards and all(card.is_too_old for card in facts.cards):
        return Obstacle(f"the kernels need compute capability 8.0, and here is {names}", _NEEDED)
    built = facts.torch_cuda
    if built is None:
        reason = f"torch is the build for CPUs, and here is {_found(facts)}"
        return Obstacle(reason, _new_build(facts, needs_driver=_is_old(facts)))
    if facts.cards and not with_kernels(facts.cards, built):
        reason = f"torch is built for CUDA {_shown(built)}, which has no kernels for {names}"
        return Obstacle(reason, _new_build(facts, needs_driver=True))
    return None


def ask_torch() -> str | None:
    """Return torch's words on why it sees no GPU, perhaps none; None if it sees one."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return None
    said = " ".join(str(one.message) for one in caught).partition("CUDA initialization: ")[2]
    said = said.partition(" (Triggered")[0]
    # Of torch's advice only the error is true of every machine.
    error = re.search(r"Error \d+: .*", said)
    return said.partition(" - ")[0].partition(". ")[0] if error is None else error[0]


def without_device(facts: GpuFacts, said: str) -> Obstacle | None:
    """Return why torch sees no GPU.

    Args:
        said: torch's words, perhaps none.
    """
    if found := re.search(r"too old \(found version (\d+)\)", said):
        facts = replace(facts, cuda=as_version(int(found[1])))
    problem = facts.problem.lower()
    if "mismatch" in problem or "Error 803" in said:
        where = "host" if facts.in_container else "machine"
        why = f"the driver was updated while the old one runs ({facts.problem or said})"
        return Obstacle(why, f"restart the {where}")
    built = facts.torch_cuda
    if built is not None and facts.cuda is not None and facts.cuda[0] < built[0]:
        driver = f"NVIDIA's driver {facts.driver}".rstrip()
        runs = f"it runs CUDA {_shown(facts.cuda)}, and torch is built for {_shown(built)}"
        fix = _update(facts)
        if not _is_old(facts):
            fix += f"; or, to keep this driver, {_reinstall(facts, facts.cuda)}"
        return Obstacle(f"{driver} is too old: {runs}", fix)
    if facts.is_hidden:
        return Obstacle("CUDA_VISIBLE_DEVICES hides every GPU", "unset CUDA_VISIBLE_DEVICES")
    if facts.missing or facts.refused:
        return _device_files(facts)
    if (lost := _lost(facts)) is not None:
        return lost
    words = said or facts.problem or "CUDA finds no device"
    fix = "wsl --shutdown in Windows, then start again" if facts.in_wsl else "restart the machine"
    return Obstacle(
        f"torch cannot use {_found(facts)} ({words})",
        f"if nvidia-smi does not show the card either, {fix}; {_LOG_OF_KERNEL}",
    )


def _no_library(facts: GpuFacts) -> Obstacle | None:
    if not facts.on_pci:
        return None
    where = ", ".join(facts.on_pci)
    if facts.in_container:
        return Obstacle(
            f"this machine has an NVIDIA card ({where}) that the container was not given",
            _pass_to_container(facts),
        )
    return Obstacle(
        f"an NVIDIA card is at {where}, and its driver is not installed (no libcuda.so.1)",
        f"install NVIDIA's driver {_NEW_DRIVER} or later, restart the machine, and see that"
        " nvidia-smi lists the card",
    )


def _device_files(facts: GpuFacts) -> Obstacle:
    if facts.in_wsl and not facts.in_container:
        listed = ", ".join((*facts.missing, *facts.refused))
        fix = "in Windows: wsl --update, then wsl --shutdown"
        return Obstacle(f"WSL does not pass the card on ({listed})", fix)
    if facts.missing:
        listed = " and ".join(facts.missing)
        verb = "is" if len(facts.missing) == 1 else "are"
        reason = f"{listed} {verb} missing, without which CUDA does not start"
        if facts.in_container:
            return Obstacle(f"{reason}, in this container", _pass_to_container(facts))
        if facts.missing == ("/dev/nvidia-uvm",):
            return Obstacle(reason, "run: sudo nvidia-modprobe -c0 -u")
        return Obstacle(
            reason,
            "run: sudo nvidia-smi && sudo nvidia-modprobe -c0 -u; if that fails, the driver's"
            f" module is not loaded: {_LOG_OF_KERNEL}",
        )
    reason = f"this process may not open {', '.join(facts.refused)}"
    if facts.in_container:
        return Obstacle(f"{reason}, in this container", _pass_to_container(facts))
    return Obstacle(
        reason,
        "`ls -l /dev/nvidia*` shows which group may: sudo usermod -aG GROUP USER, then log in"
        " again; as a service, `appliance install-service` writes a unit that may",
    )


def _lost(facts: GpuFacts) -> Obstacle | None:
    """Name the cards that the driver lists and cannot reach, as one that fell off the bus."""
    lost = [card for card in facts.cards if card.problem]
    if not lost:
        return None
    words = ", ".join(f"{card}: {card.problem}" for card in lost)
    fix = "restart the machine; if it happens again, check the card's power cables, riser and slot"
    return Obstacle(f"a card does not answer ({words})", f"{fix}; {_LOG_OF_KERNEL}")


def _pass_to_container(facts: GpuFacts) -> str:
    files = ", ".join(facts.missing) or "/dev/nvidia0, /dev/nvidiactl, /dev/nvidia-uvm"
    return (
        "start the container anew with docker run --gpus all, podman run --device"
        f" nvidia.com/gpu=all or compose.gpu.yaml; in LXC pass {files}"
    )


def _is_old(facts: GpuFacts) -> bool:
    """Return True if no build of torch serves this driver and one of the cards."""
    if facts.cuda is None or facts.cuda >= _NEW_CUDA:
        return False
    has_none = bool(facts.cards) and not with_kernels(facts.cards, _OLD_BUILD)
    return facts.cuda < _OLD_CUDA or has_none


def _new_build(facts: GpuFacts, *, needs_driver: bool) -> str:
    """Tell how to get another build of torch, and before it a driver where one is needed."""
    if not needs_driver or (facts.cuda is not None and facts.cuda >= _NEW_CUDA):
        return _reinstall(facts, facts.cuda or _NEW_CUDA)
    return f"{_update(facts)}, then {_reinstall(facts, _NEW_CUDA)}"


def _update(facts: GpuFacts) -> str:
    where = " in Windows" if facts.in_wsl else " on the host" if facts.in_container else ""
    return f"update NVIDIA's driver{where} to {_NEW_DRIVER} or later"


def _reinstall(facts: GpuFacts, cuda: tuple[int, int]) -> str:
    """Tell how to get the build of torch for a driver that runs a version of CUDA."""
    environment = Path(sys.prefix)
    setup = environment.with_name("scripts") / "setup"
    if setup.is_file():
        return f"run: rm -r {_in_shell(environment)} && {_in_shell(setup)}"
    build = _NEW_CUDA if cuda >= _NEW_CUDA else _OLD_BUILD
    if facts.in_container:
        return f"build the image with torch for CUDA {_shown(build)}: EXTRA_INDEX in the Dockerfile"
    from importlib.metadata import version  # slow to import, and seldom needed

    return (
        f"run: uv pip install --python {_in_shell(Path(sys.executable))} --reinstall-package torch"
        f" --torch-backend cu{build[0]}{build[1]} torch=={version('torch').partition('+')[0]}"
    )


def _leave_out(facts: GpuFacts) -> Obstacle | None:
    """Hide cards without kernels from torch, which else takes the first; say which."""
    if facts.torch_cuda is None:
        return None
    if (lost := _lost(facts)) is not None:
        return lost
    able = with_kernels(facts.cards, facts.torch_cuda)
    lacking = [card for card in facts.cards if card not in able]
    if not lacking or visible_gpus() is not None or not all(card.uuid for card in able):
        return None
    see_gpus(*(card.uuid for card in able))
    listed = ", ".join(map(str, lacking))
    if all(card.is_too_old for card in lacking):
        reason = f"{listed} is left out: the kernels need compute capability 8.0"
        return Obstacle(reason, "the other cards are used")
    fix = _new_build(facts, needs_driver=True)
    return Obstacle(f"{listed} is left out: this build of torch has no kernels for it", fix)


def _first_device(facts: GpuFacts) -> Obstacle | None:
    """Check the card that torch takes, which the management library may not have named."""
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's words on cards without kernels; ours follow
            major, minor = torch.cuda.get_device_capability(0)
            card = NvidiaCard(torch.cuda.get_device_name(0), 10 * major + minor)
    except RuntimeError as error:
        return without_device(facts, str(error).partition("\n")[0])
    if card.is_too_old:
        fix = _NEEDED
        if torch.cuda.device_count() > 1:
            fix = "let CUDA_VISIBLE_DEVICES name a newer card first, or use --device cpu"
        return Obstacle(f"the kernels need compute capability 8.0, and torch takes {card}", fix)
    built = facts.torch_cuda
    if built is not None and card.needs_newer(built):
        return Obstacle(
            f"torch is built for CUDA {_shown(built)}, which has no kernels for {card}",
            _new_build(facts, needs_driver=True),
        )
    return None


def _in_shell(path: Path) -> str:
    """Write a path for a shell; without the user's name, since /health shows it to everybody."""
    if path.is_relative_to(Path.home()):
        return f"~/{shlex.quote(str(path.relative_to(Path.home())))}"
    return shlex.quote(str(path))


def _found(facts: GpuFacts) -> str:
    if facts.cards:
        return ", ".join(map(str, facts.cards))
    if facts.on_pci:
        return f"an NVIDIA card at {', '.join(facts.on_pci)}"
    return "NVIDIA's driver"


def _shown(cuda: tuple[int, int]) -> str:
    return f"{cuda[0]}.{cuda[1]}"
