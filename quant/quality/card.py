"""The quality card: a checkpoint's measured quality, as frozen data and JSON beside the weights.

Imports nothing heavy: the server and the terminal read cards too.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from appliance.errors import CheckpointError
from appliance.files import open_regular, read_bytes
from appliance.model_files.gguf_names import parts_of

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA = 2
READABLE = (1, 2)  # cards of schema 1 have no kinds of text and no tool calls
BY_TOKEN = 1  # the last schema whose standard errors are over tokens, not over windows
SAMPLE_BYTES = 1 << 16  # from each end of a weight file
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
    """Predictions of a candidate compared with its base's, over the same tokens.

    Attributes:
        places: number of predictions compared.
        perplexity_ratio: candidate over base.
        kld_mean: KL(base || candidate) in nats; likewise the next four.
        same_top_percent: percentage of places where both rank the same token first.
        mean_change_percent: mean change of the true token's probability, in percentage points.
        rms_change_percent: its root mean square.
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
    """Facts about a checkpoint.

    Attributes:
        name: of its file or folder.
        weights: the storage of its linear weights, in words.
        stored_bytes: of all tensors, scales and zero points included.
        linear_parameters: of the layers' linears.
        linear_bytes: of the layers' linears, scales and zero points included.
        fingerprint: of the weight files; "" if not needed.
        readers: programs that can read it, one line each.
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
        """Bits per weight of the whole model, embeddings and head included."""
        return self.stored_bytes * 8 / self.parameters

    @property
    def linear_bits_per_weight(self) -> float:
        """Bits per weight of the layers' linears, scales and zero points included."""
        return self.linear_bytes * 8 / self.linear_parameters


@dataclass(frozen=True, slots=True)
class TextFacts:
    """The text the checkpoint was measured on.

    Attributes:
        fingerprint: changes with every token.
        windows: number of sequences, each evaluated on its own.
        window: tokens per sequence.
        stride: scored tokens per sequence; those before them are context.
    """

    source: str
    fingerprint: str
    windows: int
    window: int
    stride: int


@dataclass(frozen=True, slots=True)
class LayerError:
    """One layer's error: the norm of the difference to the base over the base's norm.

    Attributes:
        stream: of the residual stream after the layer, with all errors before.
        attention: of attention's contribution to the stream.
        mlp: of the MLP's contribution.
    """

    stream: float
    attention: float
    mlp: float


@dataclass(frozen=True, slots=True)
class KVRow:
    """The candidate with one KV cache, compared with itself and a float32 cache.

    Attributes:
        format: as `--kv-cache-dtype` names it.
        bytes_per_token: keys, values and scales in all layers.
        bits_per_value: mean bits per key or value, scales included.
        declared: the checkpoint asks for this cache.
    """

    format: str
    bytes_per_token: float
    bits_per_value: float
    comparison: Comparison
    declared: bool = False


@dataclass(frozen=True, slots=True)
class KindRow:
    """The candidate on one more kind of held-out text, compared with its base.

    Attributes:
        windows: number of passages.
    """

    kind: str
    windows: int
    comparison: Comparison


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """Questions with tools, answered greedily by base and candidate.

    A right answer calls the right tool with JSON that its schema allows.

    Attributes:
        asked: number of questions; 0 if none could be asked.
        in_template: the model's template lists tools; else a system message does.
        base_right: right answers of the base.
        same: answers of the candidate that call the same tool with the same arguments as the base.
        reason: why none were asked; "" if they were.
    """

    asked: int
    in_template: bool = False
    base_right: int = 0
    right: int = 0
    same: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PictureLoss:
    """The loss of texts behind pictures, in nats a token: means over pictures.

    Models run as they are served, each with its own tower.

    Attributes:
        pictures: number of them; 0 if none could be shown.
        tokens: of all texts.
        written: texts that the base wrote.
        base: its loss.
        change: the candidate's loss, less that of the base.
        same_top_percent: places where both find the same token likeliest.
        reason: why none were shown; "" if they were.
    """

    pictures: int
    tokens: int = 0
    written: int = 0
    base: Figure = Figure(0.0, 0.0)
    change: Figure = Figure(0.0, 0.0)
    same_top_percent: Figure = Figure(0.0, 0.0)
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another stored form of the same base, measured on the same text or read from its card."""

    name: str
    bits_per_weight: float  # of the whole model
    kld_mean: float
    same_top_percent: float
    perplexity: float


@dataclass(frozen=True, slots=True)
class QuantizeFacts:
    """The run that made the checkpoint.

    Attributes:
        calibration: text and rows, in words; "" without calibration.
        calibration_fingerprint: of all its tokens.
        seconds: from opening the model to the finished folder.
        peak_ram_bytes: 0 if not measured.
        peak_vram_bytes: likewise.
        losses: of each quantized linear's outputs on calibration text, as a share of their energy.
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
    """Resources that the evaluation took."""

    seconds: float
    cpu_seconds: float
    peak_ram_bytes: int
    peak_vram_bytes: int
    device: str


@dataclass(frozen=True, slots=True)
class TaskScore:
    """One score of lm-evaluation-harness.

    Attributes:
        metric: as the harness names it.
        error: standard error; None if the harness has none.
        questions: number asked; 0 if unknown.
    """

    task: str
    metric: str
    value: float
    error: float | None
    questions: int


@dataclass(frozen=True, slots=True)
class Card:
    """All measurements of one checkpoint.

    Without a base it has no comparison, histogram or layer errors.

    Attributes:
        prompt_int8: the candidate with inputs rounded to int8, as `--prompt-int8` does it for
            prompts, compared with itself; None without weights that allow it.
        kinds: further kinds of text.
        calls: None if it was not asked to call tools.
        pictures: None if no pictures were given.
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
    prompt_int8: Comparison | None = None
    kinds: tuple[KindRow, ...] = ()
    calls: ToolCalls | None = None
    pictures: PictureLoss | None = None
    schema: int = SCHEMA

    def line(self) -> str:
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
    """The field common to cards of all versions."""

    schema: int


def beside(model: Path, name: str) -> Path:
    """Return the path of a model's file: in its folder, or beside a weight file with its name."""
    return model / name if model.is_dir() else model.with_name(f"{model.stem}.{name}")


def card_path(model: Path) -> Path:
    """Return the card's path for a model folder or a weight file."""
    return beside(model, JSON_NAME)


def to_json(card: Card) -> bytes:
    return msgspec.json.format(msgspec.json.encode(card), indent=2) + b"\n"


def read_card(path: Path) -> Card | None:
    """Read the card at a path, or None; raise CheckpointError if the file is no card."""
    try:
        content = read_bytes(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    again = "make it again with: appliance evaluate MODEL --against BASE"
    try:
        schema = msgspec.json.decode(content, type=_Schema).schema
        if schema not in READABLE:
            raise CheckpointError(f"{path} is a card of schema {schema}, not {SCHEMA}; {again}")
        return msgspec.json.decode(content, type=Card)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is no quality card: {error}; {again}") from error


def weights_fingerprint(path: Path) -> str:
    """Hash names, sizes, and first and last bytes of a model's weight files."""
    digest = hashlib.blake2b(digest_size=8)
    files = parts_of(path) if path.is_file() else sorted(path.glob("*.safetensors"))
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with open_regular(file) as content:
            digest.update(content.read(SAMPLE_BYTES))
            content.seek(max(0, size - SAMPLE_BYTES))
            digest.update(content.read(SAMPLE_BYTES))
    return digest.hexdigest()


def card_of(model: Path) -> Card | None:
    """Read the card of a model folder or weight file; None if it has none.

    Raises:
        CheckpointError: the card is damaged, or describes other weights.
    """
    card = read_card(card_path(model))
    if card is not None and card.model.fingerprint != weights_fingerprint(model):
        raise CheckpointError(
            f"the quality card of {model} was made of other weights; make it again with:"
            f" appliance evaluate {model} --against BASE"
        )
    return card
