"""Options of `appliance quantize`. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from appliance.errors import ConfigError
from appliance.quant.formats.scheme import WeightScheme

if TYPE_CHECKING:
    from appliance.quant.formats.scheme import LinearScheme
    from appliance.quant.text.calibration import CalibrationText

MAX_SHARD_BYTES = 4 << 30
# Options that do not change a run's result.
RUN_ONLY = frozenset(
    {"overwrite", "restart", "device", "max_ram", "max_vram", "card_tokens", "open"}
)


AnyChoice = TypeVar("AnyChoice", bound=Enum)


def _named(choices: type[AnyChoice], what: str, name: str) -> AnyChoice:
    try:
        return choices(name)
    except ValueError as error:
        known = ", ".join(choice.value for choice in choices)
        raise ConfigError(f"{what} {name!r} is not known; supported: {known}") from error


class Method(Enum):
    """Method that chooses a weight's codes; the open one becomes another with the model."""

    OPEN = "open"
    RTN = "rtn"
    AWQ = "awq"
    GPTQ = "gptq"
    AWQ_GPTQ = "awq+gptq"
    FP8 = "fp8"
    INT8 = "int8"

    @classmethod
    def parse(cls, name: str) -> Method:
        """Return the method of that name, or raise ConfigError."""
        known = ", ".join(method.value for method in cls if method is not cls.OPEN)
        found = {method.value: method for method in cls if method is not cls.OPEN}.get(name)
        if found is None:
            raise ConfigError(f"method {name!r} is not known; supported: {known}")
        return found

    @property
    def needs_text(self) -> bool:
        return self.scales_inputs or self.makes_up

    @property
    def scales_inputs(self) -> bool:
        """True if the method scales inputs first (AWQ)."""
        return self in (Method.AWQ, Method.AWQ_GPTQ)

    @property
    def makes_up(self) -> bool:
        """True if later columns correct rounding errors of earlier ones (GPTQ)."""
        return self in (Method.GPTQ, Method.AWQ_GPTQ)


class WeightFormat(Enum):
    COMPRESSED_TENSORS = "compressed-tensors"
    AWQ = "awq"
    GPTQ = "gptq"
    GGUF = "gguf"

    @classmethod
    def parse(cls, name: str) -> WeightFormat:
        """Return the format of that name, or raise ConfigError."""
        return _named(cls, "format", name)


class QuantizeLibrary(Enum):
    APPLIANCE = "appliance"
    AUTOAWQ = "autoawq"
    OPTIMUM = "optimum"

    @classmethod
    def parse(cls, name: str) -> QuantizeLibrary:
        """Return the library of that name, or raise ConfigError."""
        return _named(cls, "engine", name)


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """Settings of the quantized model, its destination and the resources to use.

    Attributes:
        scheme: of the layers' linear weights. A weight whose width it does not divide gets smaller
            groups and a note.
        text: calibration text for methods that need it; by default that of `CalibrationText`.
        head: bits of the head, 4, 8 or 16; of the shared matrix if the model ties head and
            embedding. None: 16, but in GGUF 6, or 8 if the layers have 8, as llama.cpp's own.
        embedding: bits of an embedding that is not tied to the head, likewise. None: 16, but in
            GGUF those of the layers.
        mixed: mean bits per weight of the layers, scales included, spent where they matter most:
            each linear gets 3, 4, 8 or 16 bits in groups of `scheme`. None: all alike.
        format: of the written folder; a format that cannot hold the weights is refused before any
            work.
        engine: library that quantizes, if it is installed.
        restart: discard an unfinished run for this destination.
        max_ram: limit of the process's memory in bytes, libraries included; None takes what is
            free.
        max_vram: limit of torch's bytes on the GPU; None takes what is free.
        card_tokens: tokens of text for the card that follows; 0 for no card.
        max_shard_bytes: size at which a new safetensors file begins.
        kv_bits: mean bits per KV cache element, scales included, to choose each layer's precision
            by; None leaves the KV cache alone.
        open: parts of `scheme`, "symmetric" and "group_size", that are chosen with an open method.
    """

    scheme: LinearScheme = field(default_factory=WeightScheme)
    method: Method = Method.RTN
    text: CalibrationText | None = None
    head: int | None = None
    embedding: int | None = None
    mixed: float | None = None
    format: WeightFormat = WeightFormat.COMPRESSED_TENSORS
    engine: QuantizeLibrary = QuantizeLibrary.APPLIANCE
    overwrite: bool = False
    restart: bool = False
    device: str = "cpu"
    max_ram: int | None = None
    max_vram: int | None = None
    card_tokens: int = 0
    max_shard_bytes: int = MAX_SHARD_BYTES
    kv_bits: float | None = None
    open: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.kv_bits is not None and not 1 <= self.kv_bits <= 16:
            raise ConfigError(f"--kv-bits {self.kv_bits:g} is not between 1 and 16")
        if self.format is WeightFormat.GGUF:
            for flag, value in (("--kv-bits", self.kv_bits), ("--mixed", self.mixed)):
                if value is not None:
                    raise ConfigError(
                        f"a GGUF file holds no plan of {flag}; leave it out, or leave --format out"
                    )

    @property
    def head_bits(self) -> int:
        """Bits of the head, or of the matrix that is embedding and head."""
        usual = max(6, self.scheme.bits) if self.format is WeightFormat.GGUF else 16
        return usual if self.head is None else self.head

    @property
    def embedding_bits(self) -> int:
        """Bits of an embedding of its own."""
        usual = self.scheme.bits if self.format is WeightFormat.GGUF else 16
        return usual if self.embedding is None else self.embedding

    @property
    def form(self) -> str:
        """The weights' scheme, in words."""
        mixed = "" if self.mixed is None else f", mixed to {self.mixed:g} bits on average"
        return f"{self.scheme}{mixed}"

    @property
    def needs_text(self) -> bool:
        """True if codes or precisions are chosen with calibration rows."""
        return self.method.needs_text or self.mixed is not None or self.kv_bits is not None


def choose_device(name: str) -> str:
    """Return "cpu" or "cuda"; "auto" prefers a GPU. Raises ConfigError if there is none."""
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("torch sees no CUDA device; use --device cpu")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"
