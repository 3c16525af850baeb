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
        max_shard_bytes: where a new safetensors file begins.
        kv_bits: of an element of the KV cache on average, scales included, for which each layer's
            precision is chosen with the calibration text; None leaves the KV cache alone.
    """

    scheme: WeightScheme = field(default_factory=WeightScheme)
    method: Method = Method.RTN
    text: CalibrationText | None = None
    overwrite: bool = False
    max_shard_bytes: int = MAX_SHARD_BYTES
    kv_bits: float | None = None

    def __post_init__(self) -> None:
        if self.kv_bits is not None and not 1 <= self.kv_bits <= 16:
            raise ConfigError(f"--kv-bits {self.kv_bits:g} is not between 1 and 16")
