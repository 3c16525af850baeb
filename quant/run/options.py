"""What a person asks of `appliance quantize`. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from appliance.errors import ConfigError
from appliance.quant.formats.scheme import CHANNEL, Fp8Scheme, WeightScheme

if TYPE_CHECKING:
    from appliance.quant.formats.scheme import LinearScheme
    from appliance.quant.text.calibration import CalibrationText

MAX_SHARD_BYTES = 4 << 30
BLOCK = "block"  # a group size of FP8
# Options that decide how a run goes, and nothing of what comes out.
RUN_ONLY = frozenset({"overwrite", "restart", "device", "max_ram", "max_vram"})


AnyChoice = TypeVar("AnyChoice", bound=Enum)


def _named(choices: type[AnyChoice], what: str, name: str) -> AnyChoice:
    try:
        return choices(name)
    except ValueError as error:
        known = ", ".join(choice.value for choice in choices)
        raise ConfigError(f"{what} {name!r} is not known; supported: {known}") from error


class Method(Enum):
    """How the codes of a weight are chosen."""

    RTN = "rtn"
    AWQ = "awq"
    GPTQ = "gptq"
    AWQ_GPTQ = "awq+gptq"
    SEARCH = "search"
    FP8 = "fp8"
    INT8 = "int8"

    @classmethod
    def parse(cls, name: str) -> Method:
        """The method of that name.

        Raises:
            ConfigError: there is none.
        """
        return _named(cls, "method", name)

    @property
    def needs_text(self) -> bool:
        """Whether calibration rows are shown to the model."""
        return self.scales_inputs or self.makes_up

    @property
    def scales_inputs(self) -> bool:
        """Whether inputs are scaled first."""
        return self in (Method.AWQ, Method.AWQ_GPTQ)

    @property
    def makes_up(self) -> bool:
        """Whether later columns make up for the rounding of earlier ones."""
        return self in (Method.GPTQ, Method.AWQ_GPTQ)


def choose_scheme(
    method: Method, bits: int | None, group_size: str | None, *, symmetric: bool
) -> LinearScheme:
    """What a person asked the weights to be; None is what suits the method.

    Args:
        method: FP8 and INT8 have 8 bits, and a scale for each output unless groups are asked for.
        bits: 3, 4 or 8; 4 by default.
        group_size: 32, 64, 128 or channel, of FP8 channel or block; 64 by default.
        symmetric: no zero points.

    Raises:
        ConfigError: these do not go together.
    """
    if method in (Method.FP8, Method.INT8) and bits not in (None, 8):
        raise ConfigError(f"--method {method.value} has 8 bits; leave --bits {bits} out")
    if method is Method.FP8:
        word = (group_size or CHANNEL).strip().lower()
        if word not in (CHANNEL, BLOCK):
            raise ConfigError(
                f"group size {word!r} is not one of FP8: {CHANNEL}, or {BLOCK} for 128x128 weights"
            )
        if not symmetric:
            raise ConfigError("FP8 has no zero points; leave --no-symmetric out")
        return Fp8Scheme(blockwise=word == BLOCK)
    if method is Method.SEARCH and symmetric:
        raise ConfigError(
            "--method search needs --no-symmetric: for symmetric weights nothing that was tried"
            " without text is better than rtn"
        )
    if method is Method.INT8:
        return WeightScheme.parse(bits=8, group_size=group_size or CHANNEL, symmetric=symmetric)
    return WeightScheme.parse(
        bits=4 if bits is None else bits, group_size=group_size or "64", symmetric=symmetric
    )


def end_scheme(bits: int, layers: LinearScheme) -> WeightScheme | None:
    """The scheme of an embedding or head of 4 or 8 bits; of 16, None.

    Groups and zero points are those of the layers, where these have any.

    Raises:
        ConfigError: other bits.
    """
    if bits == 16:
        return None
    if bits not in (4, 8):
        raise ConfigError(f"a head of {bits} bits is not supported; use 4, 8 or 16")
    if isinstance(layers, WeightScheme):
        return replace(layers, bits=bits)
    return WeightScheme(bits)


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
        return _named(cls, "format", name)


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
        return _named(cls, "engine", name)


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """Everything that decides what a quantized model is like, and where it may go.

    Attributes:
        scheme: of the layers' linear weights. One whose width it does not divide gets a smaller
            group, which is noted.
        method: how codes are chosen.
        text: what to calibrate with, for methods that do; by default what `CalibrationText` says.
        head: bits of the head, 4, 8 or 16. Where the model uses one matrix for both ends, of that.
        embedding: bits of the embedding of a model with a head of its own, likewise.
        mixed: bits for each of the layers' weights, scales included, to spend where it matters
            most: each linear gets 3, 4, 8 or 16 bits in groups of `scheme`. None: all alike.
        format: of the folder that is written; AWQ and GPTQ hold less than compressed-tensors, and
            what they do not is refused before any work is done.
        engine: another library may do the work, if it is installed.
        overwrite: replace an older model folder at the destination.
        restart: discard what an unfinished run for this destination left.
        device: where layers compute.
        max_ram: bytes of memory that the process may use at most, all libraries included; None
            takes what is free.
        max_vram: bytes that torch may allocate on the GPU at most; None takes what is free.
        max_shard_bytes: where a new safetensors file begins.
        kv_bits: of an element of the KV cache on average, scales included, for which each layer's
            precision is chosen with the calibration text; None leaves the KV cache alone.
    """

    scheme: LinearScheme = field(default_factory=WeightScheme)
    method: Method = Method.RTN
    text: CalibrationText | None = None
    head: int = 16
    embedding: int = 16
    mixed: float | None = None
    format: WeightFormat = WeightFormat.COMPRESSED_TENSORS
    engine: Engine = Engine.APPLIANCE
    overwrite: bool = False
    restart: bool = False
    device: str = "cpu"
    max_ram: int | None = None
    max_vram: int | None = None
    max_shard_bytes: int = MAX_SHARD_BYTES
    kv_bits: float | None = None

    def __post_init__(self) -> None:
        if self.kv_bits is not None and not 1 <= self.kv_bits <= 16:
            raise ConfigError(f"--kv-bits {self.kv_bits:g} is not between 1 and 16")

    @property
    def form(self) -> str:
        """What weights become, in words."""
        mixed = "" if self.mixed is None else f", mixed to {self.mixed:g} bits on average"
        return f"{self.scheme}{mixed}"

    @property
    def needs_text(self) -> bool:
        """Whether the model is shown calibration rows, to choose codes or precisions."""
        return self.method.needs_text or self.mixed is not None or self.kv_bits is not None


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
