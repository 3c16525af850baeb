"""What a person asks of `appliance quantize`. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from appliance.errors import ConfigError
from appliance.quant.scheme import WeightScheme

if TYPE_CHECKING:
    from appliance.quant.calibration import CalibrationText

MAX_SHARD_BYTES = 4 << 30
# Options that decide how a run goes, and nothing of what comes out.
RUN_ONLY = frozenset({"overwrite", "restart", "device", "max_ram", "max_vram"})


class Method(Enum):
    """How the codes of a weight are chosen."""

    RTN = "rtn"
    AWQ = "awq"
    GPTQ = "gptq"
    AWQ_GPTQ = "awq+gptq"

    @classmethod
    def parse(cls, name: str) -> Method:
        """The method of that name.

        Raises:
            ConfigError: there is none.
        """
        try:
            return cls(name)
        except ValueError as error:
            known = ", ".join(method.value for method in cls)
            raise ConfigError(f"method {name!r} is not known; supported: {known}") from error

    @property
    def needs_text(self) -> bool:
        """Whether calibration rows are shown to the model."""
        return self is not Method.RTN

    @property
    def scales_inputs(self) -> bool:
        """Whether inputs are scaled first."""
        return self in (Method.AWQ, Method.AWQ_GPTQ)

    @property
    def makes_up(self) -> bool:
        """Whether later columns make up for the rounding of earlier ones."""
        return self in (Method.GPTQ, Method.AWQ_GPTQ)


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """Everything that decides what a quantized model is like, and where it may go.

    Attributes:
        scheme: a weight whose width it does not divide gets a smaller group, which is noted.
        method: how codes are chosen.
        text: what to calibrate with, for methods that do; by default what `CalibrationText` says.
        overwrite: replace an older model folder at the destination.
        restart: discard what an unfinished run for this destination left.
        device: where layers compute.
        max_ram: bytes of memory that the process may use at most, all libraries included; None
            takes what is free.
        max_vram: bytes that torch may allocate on the GPU at most; None takes what is free.
        max_shard_bytes: where a new safetensors file begins.
    """

    scheme: WeightScheme = field(default_factory=WeightScheme)
    method: Method = Method.RTN
    text: CalibrationText | None = None
    overwrite: bool = False
    restart: bool = False
    device: str = "cpu"
    max_ram: int | None = None
    max_vram: int | None = None
    max_shard_bytes: int = MAX_SHARD_BYTES


def choose_device(name: str) -> str:
    """Cpu or cuda; "auto" is the GPU where there is one.

    Raises:
        ConfigError: there is no such device.
    """
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("torch sees no CUDA device; use --device cpu")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"
