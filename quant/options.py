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


class WeightFormat(Enum):
    """How quantized weights are stored."""

    COMPRESSED_TENSORS = "compressed-tensors"
    AWQ = "awq"
    GPTQ = "gptq"

    @classmethod
    def parse(cls, name: str) -> WeightFormat:
        """The format of that name.

        Raises:
            ConfigError: there is none.
        """
        try:
            return cls(name)
        except ValueError as error:
            known = ", ".join(format.value for format in cls)
            raise ConfigError(f"format {name!r} is not known; supported: {known}") from error


class Engine(Enum):
    """Whose code quantizes."""

    APPLIANCE = "appliance"
    AUTOAWQ = "autoawq"
    OPTIMUM = "optimum"

    @classmethod
    def parse(cls, name: str) -> Engine:
        """The engine of that name.

        Raises:
            ConfigError: there is none.
        """
        try:
            return cls(name)
        except ValueError as error:
            known = ", ".join(engine.value for engine in cls)
            raise ConfigError(f"engine {name!r} is not known; supported: {known}") from error


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """Everything that decides what a quantized model is like, and where it may go.

    Attributes:
        scheme: a weight whose width it does not divide gets a smaller group, which is noted.
        method: how codes are chosen.
        text: what to calibrate with, for methods that do; by default what `CalibrationText` says.
        format: of the folder that is written; AWQ and GPTQ hold less than compressed-tensors, and
            what they do not is refused before any work is done.
        engine: another library may do the work, if it is installed.
        overwrite: replace an older model folder at the destination.
        max_shard_bytes: where a new safetensors file begins.
    """

    scheme: WeightScheme = field(default_factory=WeightScheme)
    method: Method = Method.RTN
    text: CalibrationText | None = None
    format: WeightFormat = WeightFormat.COMPRESSED_TENSORS
    engine: Engine = Engine.APPLIANCE
    overwrite: bool = False
    max_shard_bytes: int = MAX_SHARD_BYTES
