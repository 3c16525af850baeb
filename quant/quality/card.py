"""The quality card: what a checkpoint is worth, as frozen data, and its JSON beside the weights.

Imports nothing heavy: the server and the terminal read cards too.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from appliance.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA = 1
SAMPLE_BYTES = 1 << 16  # of each end of a weight file
JSON_NAME = "quality.json"
MARKDOWN_NAME = "QUALITY.md"
HTML_NAME = "quality.html"


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value and its standard error."""

    value: float
    error: float


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts between edges; the edges are powers of ten."""

    log10_edges: tuple[float, ...]  # one more than counts
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A candidate's predictions beside its base's, over the same tokens.

    Attributes:
        places: predictions compared.
        perplexity: of the candidate.
        base_perplexity: of the base.
        perplexity_ratio: the one by the other.
        kld_mean: KL(base || candidate), nats; likewise the next four.
        same_top_percent: where both find the same token likeliest.
        mean_change_percent: of the true token's probability, in percent points.
        rms_change_percent: the root of its mean square.
    """

    places: int
    perplexity: Figure
    base_perplexity: Figure
    perplexity_ratio: Figure
    kld_mean: Figure
    kld_median: float
    kld_p99: float
    kld_p999: float
    kld_max: float
    same_top_percent: Figure
    mean_change_percent: Figure
    rms_change_percent: Figure


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A checkpoint.

    Attributes:
        name: of its file or folder.
        architecture: family.
        weights: how its linear weights are stored, in words.
        parameters: numbers in the whole model.
        stored_bytes: all tensors, scales and zero points included.
        linear_parameters: numbers in the weights of the layers' linears.
        linear_bytes: these with their scales and zero points.
        fingerprint: of the weight files; "" where it does not matter.
        readers: who can read it, one line each.
    """

    name: str
    architecture: str
    weights: str
    parameters: int
    stored_bytes: int
    linear_parameters: int
    linear_bytes: int
    fingerprint: str = ""
    readers: tuple[str, ...] = ()

    @property
    def bits_per_weight(self) -> float:
        """Of the whole model, embeddings and head included."""
        return self.stored_bytes * 8 / self.parameters

    @property
    def linear_bits_per_weight(self) -> float:
        """Of the layers' linears, scales and zero points included."""
        return self.linear_bytes * 8 / self.linear_parameters


@dataclass(frozen=True, slots=True)
class TextFacts:
    """What was read to measure.

    Attributes:
        source: in words.
        fingerprint: changes with every token.
        windows: sequences, each read by itself.
        window: tokens in each.
        stride: tokens of each window that are scored; those before them are context.
    """

    source: str
    fingerprint: str
    windows: int
    window: int
    stride: int


@dataclass(frozen=True, slots=True)
class LayerError:
    """One layer beside the base's, relative: the norm of the difference by the norm.

    Attributes:
        stream: of the residual stream after the layer, which adds up what came before.
        attention: of what attention adds to the stream.
        mlp: of what the MLP adds.
    """

    stream: float
    attention: float
    mlp: float


@dataclass(frozen=True, slots=True)
class KVRow:
    """The candidate with one KV cache beside itself with a float32 one.

    Attributes:
        format: of the cache, as `--kv-cache-dtype` has it.
        bytes_per_token: of all layers, keys and values and scales.
        bits_per_value: the same for one number.
        comparison: what it costs.
        declared: whether the checkpoint asks for this one.
    """

    format: str
    bytes_per_token: float
    bits_per_value: float
    comparison: Comparison
    declared: bool = False


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another way to store the same base, measured on the same text or taken from its card."""

    name: str
    bits_per_weight: float  # of the whole model
    kld_mean: float
    same_top_percent: float
    perplexity: float


@dataclass(frozen=True, slots=True)
class QuantizeFacts:
    """The run that made the checkpoint.

    Attributes:
        method: how codes were chosen.
        scheme: what was asked for, in words.
        calibration: text and rows, in words; "" without one.
        calibration_fingerprint: of every token of it.
        seconds: from opening the model to the finished folder.
        peak_ram_bytes: 0 where it was not measured; so the next.
        peak_vram_bytes: of a GPU.
        losses: of each quantized linear's outputs, as a share of their energy, on calibration text.
        notes: what was not done as asked.
    """

    method: str
    scheme: str
    calibration: str = ""
    calibration_fingerprint: str = ""
    seconds: float = 0.0
    peak_ram_bytes: int = 0
    peak_vram_bytes: int = 0
    losses: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Cost:
    """What the evaluation itself took."""

    seconds: float
    cpu_seconds: float
    peak_ram_bytes: int
    peak_vram_bytes: int
    device: str


@dataclass(frozen=True, slots=True)
class TaskScore:
    """One score of lm-evaluation-harness.

    Attributes:
        task: its name.
        metric: what was counted, as the harness calls it.
        value: the score.
        error: its standard error; None where the harness has none.
        questions: how many were asked; 0 if that is not known.
    """

    task: str
    metric: str
    value: float
    error: float | None
    questions: int


@dataclass(frozen=True, slots=True)
class Card:
    """All there is to say about one checkpoint's quality.

    Without a base there is no comparison, no histogram and no layer error.
    """

    created: str  # ISO 8601, UTC
    version: str  # of the appliance
    model: ModelFacts
    text: TextFacts
    perplexity: Figure
    cost: Cost
    base: ModelFacts | None = None
    comparison: Comparison | None = None
    histogram: Histogram | None = None
    layers: tuple[LayerError, ...] = ()
    kv: tuple[KVRow, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    quantize: QuantizeFacts | None = None
    tasks: tuple[TaskScore, ...] = ()
    notes: tuple[str, ...] = ()
    schema: int = SCHEMA

    def line(self) -> str:
        """The card in one line."""
        bits = f"{self.model.bits_per_weight:.2f} bits per weight"
        if self.comparison is None:
            return f"perplexity {self.perplexity.value:.2f} ({bits}; not compared with a base)"
        found = self.comparison
        return (
            f"mean KLD {found.kld_mean.value:.4f}, same top {found.same_top_percent.value:.1f} %,"
            f" perplexity x{found.perplexity_ratio.value:.3f}, {bits}"
        )


@dataclass(frozen=True, slots=True)
class _Schema:
    """What every version of a card says."""

    schema: int


def card_path(model: Path) -> Path:
    """Where the card of a model folder or of a single weight file lies."""
    return model / JSON_NAME if model.is_dir() else model.with_name(f"{model.stem}.{JSON_NAME}")


def to_json(card: Card) -> bytes:
    """The card as JSON, indented."""
    return msgspec.json.format(msgspec.json.encode(card), indent=2) + b"\n"


def read_card(path: Path) -> Card | None:
    """The card at a path, or None if there is none.

    Raises:
        CheckpointError: what is there is no card, or one of a later version.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    again = "make it again with: appliance evaluate MODEL --against BASE"
    try:
        schema = msgspec.json.decode(content, type=_Schema).schema
        if schema != SCHEMA:
            raise CheckpointError(f"{path} is a card of schema {schema}, not {SCHEMA}; {again}")
        return msgspec.json.decode(content, type=Card)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is no quality card: {error}; {again}") from error


def weights_fingerprint(path: Path) -> str:
    """Of a model's weight files: their names, sizes, beginnings and ends."""
    digest = hashlib.blake2b(digest_size=8)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as content:
            digest.update(content.read(SAMPLE_BYTES))
            content.seek(max(0, size - SAMPLE_BYTES))
            digest.update(content.read(SAMPLE_BYTES))
    return digest.hexdigest()


def card_of(model: Path) -> Card | None:
    """The card of a model folder or weight file, or None if it has none.

    Raises:
        CheckpointError: the card is damaged, or was made of other weights.
    """
    card = read_card(card_path(model))
    if card is not None and card.model.fingerprint != weights_fingerprint(model):
        raise CheckpointError(
            f"the quality card of {model} was made of other weights; make it again with:"
            f" appliance evaluate {model} --against BASE"
        )
    return card
