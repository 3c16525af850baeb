"""Computes a run's peak memory from the model's shapes.

The peak is one layer in float32, the rows of text that pass it together, and the method's working
memory for the largest linear; it does not depend on the number of layers, nor on that of a layer's
routed experts, which come one by one. The factors are upper bounds of what `rtn`, `awq` and `gptq`
allocate; a test compares them with a real run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import psutil

from appliance.errors import MemoryPlanError
from appliance.model.spec import AttentionSpec, ExpertsSpec, MLPSpec
from appliance.model.tensors import layer_slots
from appliance.quant.formats.scheme import TrellisScheme
from appliance.quant.methods.sensitivity import HEAD_ROWS
from appliance.quant.run.options import Method, QuantizeOptions
from appliance.quant.walk.pieces import PIECE_ELEMENTS, ROW_MULTIPLE
from appliance.quant.walk.places import is_plain
from appliance.quant.walk.routed_rows import ROUTE_BYTES
from appliance.quant.walk.slopes import ROW_TOKENS
from appliance.quant.walk.walk import tokens_at_once

if TYPE_CHECKING:
    from collections.abc import Iterator

    from appliance.model.source import ModelSource
    from appliance.model.spec import LayerSpec, MixerSpec
    from appliance.model.tensors import TensorSlot
    from appliance.quant.run.memory import MemoryUse
    from appliance.quant.run.plan import QuantizePlan

FLOAT_BYTES = 4
STORED_BYTES = 2  # of a number in a checkpoint
MIB = 1 << 20

# Allocated by a method at once: matrices of second moments, and float32 copies of the weight.
GPTQ_MOMENTS, GPTQ_WEIGHTS = 6, 7
AWQ_WEIGHTS, RANGE_WEIGHTS = 8, 6  # with scaled inputs, or ranges alone
ROUND_PIECES = 8  # copies of a piece in float32, for each worker
ROUND_PACKED = 3  # copies of a tensor's result: as pieces, as one, and as stored
# Copies of the linears' outputs for a token; of other mixers with chunks of states.
ATTENTION_COPIES, MIXER_COPIES = 5, 8
SCORE_COPIES = 3
# The same of layers that slopes come back through, whose results are kept.
SLOPE_COPIES, SLOPE_SCORES = 4, 6
# Variants of a layer when sensitivity is measured: a linear each, or a weight of a trellis.
LINEARS, LINEAR_PARTS = 4, 7
END_BYTES = 12  # per number of embedding and head: in the page cache, as read, and in float32
LOGITS = 4  # copies of a few tokens' logits
# The allocators' reserve, small objects, and code of torch and MKL that a run is the first to map:
# 22 MiB for RTN, up to 46 with text on x86-64.
RESERVE = 48 * MIB
SPREAD = 4 * MIB  # what two processes of the same program and model differ by


@dataclass(frozen=True, slots=True)
class RunMemory:
    """A run's peak memory in bytes.

    Attributes:
        program: bytes in use before the run: libraries, tokenizer and rows.
        parts: other bytes, by purpose.
        free: left by other programs.
        workers: number of threads that round pieces of a weight.
    """

    program: int
    parts: dict[str, int]
    vram: int
    free: int
    workers: int

    @property
    def ram(self) -> int:
        """Bytes of the whole process."""
        return self.program + sum(self.parts.values())

    def __str__(self) -> str:
        parts = {"program": self.program} | self.parts
        return ", ".join(f"{name} {size / MIB:,.0f}" for name, size in parts.items() if size)


def plan_memory(
    source: ModelSource,
    plan: QuantizePlan,
    options: QuantizeOptions,
    text: tuple[int, int],
    use: MemoryUse,
    workers: int,
    piece_elements: int,
) -> RunMemory:
    """Compute the peak, with as many workers as fit.

    Args:
        text: number of calibration rows and their tokens; zeros without.
        use: current memory use, with all libraries loaded.
        piece_elements: numbers that one worker rounds at once.

    Raises:
        MemoryPlanError: the peak exceeds the memory it may use.
    """
    on_gpu = options.device.startswith("cuda")
    packed = max(tensor.nbytes for tensor in plan.tensors if tensor.scheme is not None)
    layer = {}
    num_rows, row_tokens = text
    if row_tokens:
        layer = layer_parts(source, options, row_tokens, tokens_at_once(row_tokens))
    heap = _experts_parts(source, num_rows * row_tokens) | {
        "results": ROUND_PACKED * packed,
        "reserve": RESERVE,
    }
    vram = sum(layer.values()) if on_gpu else 0
    parts = heap if on_gpu else layer | heap
    free = psutil.virtual_memory().available
    allowed = options.max_ram or use.ram + free
    widest = max(tensor.shape[-1] for tensor in plan.tensors)
    piece = ROUND_PIECES * max(piece_elements, ROW_MULTIPLE * widest) * FLOAT_BYTES
    for count in range(workers, 0, -1):
        found = RunMemory(use.ram, parts | {"pieces": count * piece}, vram, free, count)
        if max(found.ram, use.peak_ram) <= allowed:
            break
    else:
        least = max(found.ram, use.peak_ram)
        raise MemoryPlanError(
            f"quantizing this model takes {least / MIB:,.0f} MiB of memory ({found}), but"
            f" {allowed / MIB:,.0f} MiB may be used; {_advice('--max-ram', least, options)}"
        )
    if options.max_vram is not None and vram > options.max_vram:
        advice = _advice("--max-vram", vram, options)
        raise MemoryPlanError(
            f"quantizing this model takes {vram / MIB:,.0f} MiB on the GPU, but"
            f" {options.max_vram / MIB:,.0f} MiB may be used; {advice}"
        )
    return found


def check_mixed(source: ModelSource, options: QuantizeOptions, tokens: int, use: MemoryUse) -> None:
    """Refuse `--mixed` if measuring sensitivity exceeds `--max-ram`.

    Memory holds one residual stream per linear of the model, and one layer or later the head.

    Raises:
        MemoryPlanError: the measurement does not fit.
    """
    spec = source.spec
    variants = LINEAR_PARTS if isinstance(options.scheme, TrellisScheme) else LINEARS
    streams = (1 + variants * len(spec.layers)) * tokens * spec.hidden_size
    head = spec.vocab_size * (spec.hidden_size * END_BYTES + LOGITS * HEAD_ROWS * FLOAT_BYTES)
    layer = layer_parts(source, replace(options, method=Method.AWQ), tokens, tokens)
    most = max(sum(layer.values()), head)
    needed = use.ram + streams * FLOAT_BYTES + most + RESERVE
    if options.max_ram is not None and needed > options.max_ram:
        raise MemoryPlanError(
            f"finding where bits matter most takes {needed / MIB:,.0f} MiB of memory, but"
            f" {options.max_ram / MIB:,.0f} MiB may be used; {ceiling_for('--max-ram', needed)},"
            " and without --mixed less"
        )


def ceiling_for(flag: str, needed: int) -> str:
    """Name a ceiling that the next process keeps to as well."""
    return f"{flag} {-(-(needed + SPREAD) // MIB)}MiB would do"


def _advice(flag: str, least: int, options: QuantizeOptions) -> str:
    advice = ceiling_for(flag, least)
    if options.method.needs_text:
        advice += ", and --method rtn takes less"
    return advice


def layer_parts(
    source: ModelSource, options: QuantizeOptions, row_tokens: int, tokens: int
) -> dict[str, int]:
    """Compute the parts of the layer, or the expert, that needs most memory to be quantized.

    Args:
        tokens: number that passes the layer together.
    """
    found = []
    for layer, slots in _kinds_of_layers(source):
        if is_plain(layer):
            found.append(_parts_of(layer, source.spec.hidden_size, options, row_tokens, tokens))
            continue
        for some in _held_together(slots):
            moments, copies = _method_bytes(some, options)
            method = options.method.value
            running = _running(layer, some, source.spec.hidden_size, options, row_tokens, tokens)
            found.append(running | {method: moments})
            found.append({method: moments + copies})  # the layer is read again afterwards
    return max(found, key=lambda parts: sum(parts.values()))


def running_bytes(source: ModelSource, row_tokens: int, tokens: int) -> int:
    """Compute the bytes of the largest layer, all experts included, while `tokens` pass it."""
    options, hidden = QuantizeOptions(method=Method.RTN), source.spec.hidden_size
    found = [
        _parts_of(layer, hidden, options, row_tokens, tokens)
        if is_plain(layer)
        else _running(layer, slots, hidden, options, row_tokens, tokens)
        for layer, slots in _kinds_of_layers(source)
    ]
    return max(parts["layer"] + parts["activations"] for parts in found)


def _kinds_of_layers(source: ModelSource) -> Iterator[tuple[LayerSpec, list[TensorSlot]]]:
    """Yield each distinct layer with its tensors."""
    spec = source.spec
    first = {layer: index for index, layer in reversed(list(enumerate(spec.layers)))}
    for layer, index in first.items():
        yield layer, layer_slots(spec, source.family.names, index)


def _parts_of(
    layer: LayerSpec, hidden: int, options: QuantizeOptions, row_tokens: int, tokens: int
) -> dict[str, int]:
    attention, mlp = layer.mixer, layer.mlp
    assert isinstance(attention, AttentionSpec)
    assert isinstance(mlp, MLPSpec)
    middle = mlp.intermediate_size
    queries = attention.num_heads * attention.head_dim
    keys = attention.num_kv_heads * attention.head_dim
    linears = [  # (out_features, in_features)
        (queries + 2 * keys, hidden),
        (hidden, queries),
        (2 * middle, hidden),
        (hidden, middle),
    ]
    widths = 4 * hidden + 3 * (queries + 2 * keys) + 2 * queries + 2 * keys + 3 * middle
    scores = _scores(attention, options, row_tokens)
    moments = [columns * columns for _, columns in linears]
    method = 0
    for (rows, columns), square in zip(linears, moments, strict=True):
        weight = rows * columns
        if options.method.makes_up:
            method = max(method, GPTQ_MOMENTS * square + GPTQ_WEIGHTS * weight)
        else:
            method = max(method, square + AWQ_WEIGHTS * weight)
        if options.method.scales_inputs:
            method = max(method, sum(moments) + AWQ_WEIGHTS * weight)
    if options.method.weighs_outputs:
        scored = SLOPE_SCORES * attention.num_heads * min(row_tokens, ROW_TOKENS)
        kept = ROW_TOKENS * (SLOPE_COPIES * widths + scored)
        method = max(method, kept + 2 * PIECE_ELEMENTS)
    return {
        "layer": sum(rows * columns for rows, columns in linears) * FLOAT_BYTES,
        "activations": tokens * (widths + scores) * FLOAT_BYTES,
        options.method.value: method * FLOAT_BYTES,
    }


def _scores(mixer: MixerSpec | None, options: QuantizeOptions, row_tokens: int) -> int:
    """Count a token's scores that exist at once where attention has no flash kernel."""
    if not isinstance(mixer, AttentionSpec):
        return 0
    is_whole = mixer.softcap is not None or mixer.sinks or options.device.startswith("cuda")
    return SCORE_COPIES * mixer.num_heads * row_tokens if is_whole else 0


def _running(
    layer: LayerSpec,
    slots: list[TensorSlot],
    hidden: int,
    options: QuantizeOptions,
    row_tokens: int,
    tokens: int,
) -> dict[str, int]:
    """Compute the parts of a layer of another kind, or of one expert, while tokens pass it."""
    rows = sum(slot.shape[0] for slot in slots if slot.is_linear and slot.expert is None)
    widest = max(slot.shape[0] for slot in slots)
    copies = ATTENTION_COPIES if isinstance(layer.mixer, AttentionSpec) else MIXER_COPIES
    widths = 4 * hidden + copies * (rows + widest) + _scores(layer.mixer, options, row_tokens)
    return {
        "layer": sum(prod(slot.shape) for slot in slots) * FLOAT_BYTES,
        "activations": tokens * widths * FLOAT_BYTES,
    }


def _method_bytes(slots: list[TensorSlot], options: QuantizeOptions) -> tuple[int, int]:
    """Compute the moments and the copies for the largest of some weights; see `calibrated`."""
    linears = [slot.shape for slot in slots if slot.is_linear]
    square = max((columns**2 for _, columns in linears), default=0)
    weight = max(map(prod, linears), default=0)
    copies = RANGE_WEIGHTS * weight
    if options.method.makes_up:
        copies = GPTQ_MOMENTS * square + GPTQ_WEIGHTS * weight
    return square * FLOAT_BYTES, copies * FLOAT_BYTES


def _held_together(slots: list[TensorSlot]) -> list[list[TensorSlot]]:
    """Split a layer's tensors into those that memory holds at once: routed experts come alone."""
    one = [slot for slot in slots if slot.expert == 0]
    if not one:
        return [slots]
    return [[slot for slot in slots if slot.expert is None], one]


def _experts_parts(source: ModelSource, num_tokens: int) -> dict[str, int]:
    """Compute what all experts of a layer need beside the one in work."""
    specs = [layer.mlp for layer in source.spec.layers if isinstance(layer.mlp, ExpertsSpec)]
    choices = max((spec.router.top_k for spec in specs), default=0)
    matrix = 0
    if source.family.names.experts.transposed:  # read whole, for all of its rows
        matrix = max((2 * spec.intermediate_size for spec in specs), default=0)
    return {
        "routes": num_tokens * choices * ROUTE_BYTES,
        "stored expert": matrix * source.spec.hidden_size * STORED_BYTES,
    }
