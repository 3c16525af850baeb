"""Options of `appliance quantize`: methods, formats and schemes. Imports nothing heavy."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias, TypeVar, cast

from appliance.errors import ConfigError
from appliance.kernels.gpu.obstacle import gpu_use
from appliance.quant.formats.ggml_forms import BlockScheme
from appliance.quant.formats.scheme import (
    CHANNEL,
    Fp4Scheme,
    Fp8Scheme,
    TrellisScheme,
    WeightScheme,
)
from appliance.quant.gguf.mixes import MIXES, mix_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from appliance.kernels.weights.fp4 import Fp4Weight
    from appliance.kernels.weights.fp8 import Fp8Weight
    from appliance.kernels.weights.ggml import GgmlWeight
    from appliance.kernels.weights.packed import PackedWeight
    from appliance.kernels.weights.trellis import TrellisWeight
    from appliance.quant.formats.scheme import LinearScheme
    from appliance.quant.text.calibration import CalibrationText

    QuantizedWeight: TypeAlias = PackedWeight | Fp8Weight | Fp4Weight | GgmlWeight | TrellisWeight

logger = logging.getLogger(__name__)

MAX_SHARD_BYTES = 4 << 30
# Options that do not change a run's result.
RUN_ONLY = frozenset(
    {"overwrite", "restart", "device", "max_ram", "max_vram", "card_tokens", "open", "reader"}
)
AnyChoice = TypeVar("AnyChoice", bound=Enum)
BLOCK = "block"  # a group size of FP8
# The usual type of GGUF files for as many bits.
TYPE_OF_BITS = {2: "Q2_K", 3: "Q3_K_M", 4: "Q4_K_M", 5: "Q5_K_M", 6: "Q6_K", 8: "Q8_0"}


@dataclass(frozen=True, slots=True)
class _Traits:
    """Traits of a method.

    Attributes:
        file: of `quant/methods`, whose `quantize_linear` chooses codes.
        needs_text: it chooses by the inputs of calibration text.
        scales_inputs: it scales inputs first (AWQ).
        makes_up: later columns correct rounding errors of earlier ones (GPTQ).
        weighs_outputs: outputs share codes, by how much each of them matters.
    """

    file: str = ""
    needs_text: bool = False
    scales_inputs: bool = False
    makes_up: bool = False
    weighs_outputs: bool = False


class Method(Enum):
    """Method that chooses a weight's codes; the open one becomes another with the model."""

    OPEN = "open"
    RTN = "rtn", _Traits("data_free")
    AWQ = "awq", _Traits("awq", needs_text=True, scales_inputs=True)
    GPTQ = "gptq", _Traits("gptq", needs_text=True, makes_up=True)
    AWQ_GPTQ = "awq+gptq", _Traits("gptq", needs_text=True, scales_inputs=True, makes_up=True)
    FP8 = "fp8", _Traits("data_free")
    INT8 = "int8", _Traits("data_free")
    MXFP4 = "mxfp4", _Traits("fp4", needs_text=True, makes_up=True)
    NVFP4 = "nvfp4", _Traits("fp4", needs_text=True, makes_up=True)
    TRELLIS = "trellis", _Traits("trellis", needs_text=True, makes_up=True, weighs_outputs=True)

    def __new__(cls, name: str, traits: _Traits = _Traits()) -> Self:
        method = object.__new__(cls)
        method._value_ = name
        method.traits = traits
        return method

    traits: _Traits

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
        return self.traits.needs_text

    @property
    def scales_inputs(self) -> bool:
        return self.traits.scales_inputs

    @property
    def makes_up(self) -> bool:
        return self.traits.makes_up

    @property
    def weighs_outputs(self) -> bool:
        return self.traits.weighs_outputs

    @property
    def quantizer(self) -> Quantizer:
        """The function that chooses codes.

        Raises:
            NotImplementedError: the method is only named here.
        """
        name = f"appliance.quant.methods.{self.traits.file}"
        if self.traits.file and find_spec(name) is not None:
            found = getattr(import_module(name), "quantize_linear", None)
            if found is not None:
                return cast("Quantizer", found)
        raise NotImplementedError(f"--method {self.value} is named, but nothing quantizes by it")


FP4_METHODS = (Method.MXFP4, Method.NVFP4)


class Quantizer(Protocol):
    """Chooses a linear weight's codes: `quantize_linear` in a method's file."""

    def __call__(
        self, weight: Tensor, hessian: Tensor | None, scheme: LinearScheme, dtype: torch.dtype
    ) -> QuantizedWeight:
        """Quantize a weight (out_features, in_features), finite.

        Args:
            hessian: (in_features, in_features) float32, mean of x x^T over calibration tokens;
                None if the method needs no text, or if no text reached the weight.
            dtype: of stored scales.
        """
        ...


def _named(choices: type[AnyChoice], what: str, name: str) -> AnyChoice:
    try:
        return choices(name)
    except ValueError as error:
        known = ", ".join(choice.value for choice in choices)
        raise ConfigError(f"{what} {name!r} is not known; supported: {known}") from error


class WeightFormat(Enum):
    COMPRESSED_TENSORS = "compressed-tensors"
    AWQ = "awq"
    GPTQ = "gptq"
    GGUF = "gguf"
    TRELLIS = "trellis"

    @classmethod
    def parse(cls, name: str) -> WeightFormat:
        """Return the format of that name, or raise ConfigError."""
        return _named(cls, "format", name)


class ResultReader(Enum):
    """A program for which a result is made.

    Members hold the name that `--for` takes and the formats that the program reads.
    """

    APPLIANCE = "appliance", tuple(WeightFormat)
    LLAMA_CPP = "llama.cpp", (WeightFormat.GGUF,)
    TRANSFORMERS = "transformers", (WeightFormat.COMPRESSED_TENSORS,)
    VLLM = "vllm", (WeightFormat.COMPRESSED_TENSORS, WeightFormat.AWQ, WeightFormat.GPTQ)

    def __new__(cls, name: str, formats: tuple[WeightFormat, ...]) -> Self:
        reader = object.__new__(cls)
        reader._value_ = name
        reader.formats = formats
        return reader

    formats: tuple[WeightFormat, ...]

    @classmethod
    def parse(cls, name: str) -> ResultReader:
        """Return the reader of that name, or raise ConfigError."""
        return _named(cls, "reader", name)


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
        open: what is chosen with an open method: parts of `scheme`, "symmetric" and "group_size";
            "format"; and "text" if none may be read.
        file_type: of a GGUF file, a key of `MIXES`; `scheme` is its base. "" for folders.
        reader: program that must read the result; None for any.
        tower_bits: of the matrices in a vision tower's layers, 16 or 8.
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
    file_type: str = ""
    reader: ResultReader | None = None
    tower_bits: int = 16

    @classmethod
    def of_type(cls, name: str, **changes: Any) -> QuantizeOptions:
        """Return options of a GGUF file; raises ConfigError for a type that is not in `MIXES`."""
        mix = mix_of(name)
        scheme = BlockScheme(mix.base)
        return cls(scheme, format=WeightFormat.GGUF, file_type=mix.name, **changes)

    def __post_init__(self) -> None:
        if self.tower_bits not in (8, 16):
            raise ConfigError(f"--tower {self.tower_bits} is not 8 or 16")
        holds = (WeightFormat.COMPRESSED_TENSORS, WeightFormat.GGUF)
        if self.tower_bits == 8 and self.format not in holds:
            raise ConfigError(
                f"--format {self.format.value} holds no tower of 8 bits; leave --tower out, or use"
                " --format compressed-tensors or gguf"
            )
        if self.tower_bits == 8 and self.reader is ResultReader.TRANSFORMERS:
            raise ConfigError(
                "transformers does not load towers of 8 bits of all models (SigLIP's classes read"
                " weights that are packed then); leave --tower or --for out"
            )
        if self.kv_bits is not None and not 1 <= self.kv_bits <= 16:
            raise ConfigError(f"--kv-bits {self.kv_bits:g} is not between 1 and 16")
        if self.format is WeightFormat.GGUF:
            assert self.file_type in MIXES, self.file_type
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
        if self.file_type:
            return self.file_type
        mixed = "" if self.mixed is None else f", mixed to {self.mixed:g} bits on average"
        return f"{self.scheme}{mixed}"

    @property
    def needs_text(self) -> bool:
        """True if codes or precisions are chosen with calibration rows."""
        return self.method.needs_text or self.mixed is not None or self.kv_bits is not None


def choose_device(name: str) -> str:
    """Return "cpu" or "cuda"; "auto" prefers a GPU. Raises ConfigError if there is none."""
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not auto, cpu or cuda")
    if name == "cpu":
        return "cpu"
    use = gpu_use()
    if name == "cuda" and not use.is_usable:
        raise ConfigError(use.refusal())
    if use.obstacle is not None:
        logger.warning("%s", use.in_words())
    return "cuda" if use.is_usable else "cpu"


@dataclass(frozen=True, slots=True)
class Asked:
    """Method and scheme that a command asks for.

    Attributes:
        open: what is chosen with an open method; see `QuantizeOptions`.
        file_type: of a GGUF file, a key of `MIXES`; "" for folders.
    """

    method: Method
    scheme: LinearScheme
    open: frozenset[str] = frozenset()
    file_type: str = ""


def read_asked(
    method: Method | None,
    bits: int | None,
    group_size: str | None,
    *,
    symmetric: bool | None,
    format: WeightFormat = WeightFormat.COMPRESSED_TENSORS,
    file_type: str | None = None,
) -> Asked:
    """Read a command's words; None takes the default, which a method of its own decides.

    Without a method 8 bits are INT8, whose loss is small without text. Other bits leave the method
    open, and have zero points until the model is known.

    Raises:
        ConfigError: the options contradict each other.
    """
    if (method is Method.TRELLIS) != (format is WeightFormat.TRELLIS):
        raise ConfigError("--method trellis makes --format trellis, and nothing else does")
    if format is WeightFormat.GGUF:
        return _read_file_type(method, bits, group_size, symmetric, file_type)
    if file_type is not None:
        raise ConfigError(
            f"--type {file_type} is of GGUF files; leave it or --format {format.value} out"
        )
    if method is None and bits == 8:
        method = Method.INT8
    if method is not None:
        return Asked(
            method, choose_scheme(method, bits, group_size, symmetric=symmetric is not False)
        )
    given = {"symmetric": symmetric, "group_size": group_size}
    scheme = choose_scheme(Method.OPEN, bits, group_size, symmetric=bool(symmetric))
    left_open = frozenset(name for name, value in given.items() if value is None)
    return Asked(Method.OPEN, scheme, left_open)


def _read_file_type(
    method: Method | None,
    bits: int | None,
    group_size: str | None,
    symmetric: bool | None,
    file_type: str | None,
) -> Asked:
    if method in (Method.FP8, *FP4_METHODS):
        raise ConfigError(
            f"--method {method.value} makes no codes of a GGUF type; use --method int8, or --bits"
        )
    flags = {
        f"--group-size {group_size}": group_size is not None,
        "--symmetric": symmetric is True,
        "--no-symmetric": symmetric is False,
        f"--bits {bits}": file_type is not None and bits is not None,
    }
    for flag in (flag for flag, is_given in flags.items() if is_given):
        raise ConfigError(
            f"a GGUF type has its own bits, groups and minima; leave {flag} out, and name a type"
            " with --type"
        )
    usual = 8 if method is Method.INT8 else 4
    if file_type is None and (file_type := TYPE_OF_BITS.get(bits or usual)) is None:
        known = ", ".join(map(str, TYPE_OF_BITS))
        raise ConfigError(f"--bits {bits} names no GGUF type; use {known}, or --type")
    mix = mix_of(file_type)
    if method is Method.INT8 and mix.base != "Q8_0":
        raise ConfigError(f"--method int8 makes Q8_0; leave it or --type {mix.name} out")
    if method is None:
        method = Method.INT8 if mix.base == "Q8_0" else Method.OPEN
    return Asked(method, BlockScheme(mix.base), frozenset(), mix.name)


def choose_scheme(
    method: Method, bits: int | None, group_size: str | None, *, symmetric: bool
) -> LinearScheme:
    """Choose a folder's scheme; None takes the method's default.

    Args:
        method: FP8 and INT8 have 8 bits, and one scale per output unless a group size is given.
        bits: 3, 4 or 8; 4 by default.
        group_size: 32, 64, 128 or channel; for FP8, channel or block; 64 by default.
        symmetric: no zero points.

    Raises:
        ConfigError: the options contradict each other.
    """
    if method in (Method.FP8, Method.INT8) and bits not in (None, 8):
        raise ConfigError(f"--method {method.value} has 8 bits; leave --bits {bits} out")
    if method in FP4_METHODS:
        scheme = Fp4Scheme(has_powers=method is Method.MXFP4)
        flags = {
            f"--bits {bits}": bits in (None, 4),
            f"--group-size {group_size}": group_size in (None, str(scheme.group_size)),
            "--no-symmetric": symmetric,
        }
        for flag in (flag for flag, is_its_own in flags.items() if not is_its_own):
            raise ConfigError(
                f"--method {method.value} has 4 bits in groups of {scheme.group_size} without zero"
                f" points; leave {flag} out"
            )
        return scheme
    if method is Method.TRELLIS:
        if group_size is not None:
            raise ConfigError(
                f"--method trellis has a scale per output; leave --group-size {group_size} out"
            )
        return TrellisScheme(4 if bits is None else bits)
    if method is Method.FP8:
        word = (group_size or CHANNEL).strip().lower()
        if word not in (CHANNEL, BLOCK):
            raise ConfigError(
                f"group size {word!r} is not one of FP8: {CHANNEL}, or {BLOCK} for 128x128 weights"
            )
        if not symmetric:
            raise ConfigError("FP8 has no zero points; leave --no-symmetric out")
        return Fp8Scheme(blockwise=word == BLOCK)
    if method is Method.INT8:
        return WeightScheme.parse(bits=8, group_size=group_size or CHANNEL, symmetric=symmetric)
    return WeightScheme.parse(
        bits=4 if bits is None else bits, group_size=group_size or "64", symmetric=symmetric
    )


def end_scheme(bits: int, layers: LinearScheme) -> LinearScheme | None:
    """Return the scheme of an embedding or head; None for 16 bits.

    In a folder, group size and symmetry are those of the layers, if they have any; in a GGUF file
    an end of as many bits as the layers has their type.

    Raises:
        ConfigError: the bits are not supported.
    """
    if bits == 16:
        return None
    if isinstance(layers, TrellisScheme):
        return TrellisScheme(bits)
    if isinstance(layers, BlockScheme):
        if bits == layers.bits:
            return layers
        if bits not in TYPE_OF_BITS:
            known = ", ".join(map(str, TYPE_OF_BITS))
            raise ConfigError(f"a head of {bits} bits is no GGUF type; use {known} or 16")
        return BlockScheme(MIXES[TYPE_OF_BITS[bits]].base)
    if bits not in (4, 8):
        raise ConfigError(
            f"a head of {bits} bits is not supported; use 4, 8 or 16, or --format gguf"
        )
    if isinstance(layers, WeightScheme):
        return replace(layers, bits=bits)
    return WeightScheme(bits)
