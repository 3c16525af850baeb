"""Counts the bytes of an encoder in the C library, before it is loaded."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from appliance.kernels.cpu.cache import PAGE_TOKENS
from appliance.model.encoder.spec import encoder_slots
from appliance.model.native_support import HEAD_WIDTH_STEP
from appliance.model.rope import distinct_ropes

if TYPE_CHECKING:
    from appliance.model.encoder.source import EncoderSource
    from appliance.model.encoder.spec import EncoderSpec
    from appliance.model.spec import DecoderSpec, RopeSpec

TABLE_BITS = 8  # of tokens' embeddings, where matrices are rounded
# The library's workspace: streams of hidden states (before and after a norm, QKV, heads' output,
# forms in 8 bits), and what attention keeps for a thread.
_STREAMS, _THREAD_BYTES = 8, 1 << 20


def native_bytes(source: EncoderSource, dtype: Any, bits: int | None) -> int:
    """Return the bytes of the weights, rounded up: matrices in `dtype`, or in 8 or 4 bits."""
    spec, names, prefix = source.spec, source.names, source.prefix
    own = {f"{prefix}{names.positions}.weight", f"{prefix}{names.token_types}.weight"}
    total = max(1, spec.token_types) * spec.positions * spec.hidden_size * dtype.itemsize
    head = (names.dense.format(prefix), names.classifier) if spec.ranking else ()
    for name, shape in encoder_slots(spec, names, prefix).items():
        if name in own:
            continue
        held = source.bytes_per_weight(name)
        each: float = 4 if len(shape) == 1 or name.startswith(head) else dtype.itemsize
        if bits and len(shape) == 2 and not shape[1] % 32 and not name.startswith(head):
            # codes, and scales of groups of 32 at most
            each = (TABLE_BITS if name == f"{prefix}{names.tokens}.weight" else bits) / 8 + 1 / 8
        each = each if held is None else held + 1 / 8  # scales may widen
        rows = -(-shape[0] // HEAD_WIDTH_STEP) * HEAD_WIDTH_STEP  # of whole tiles
        total += int(rows * prod(shape[1:]) * each) + 64
    return int(total)


def workspace_bytes(spec: EncoderSpec, max_tokens: int, max_texts: int, threads: int) -> int:
    """Return the bytes that the largest step needs beside the weights."""
    inner = spec.intermediate_size * (2 if spec.gated else 1)
    angles = len(rotations(spec)) * spec.head_dim
    codes = max(spec.intermediate_size, spec.hidden_size)  # two bytes and scales of an input
    row = (_STREAMS * spec.hidden_size + inner + angles + codes) * 4
    slots = max_tokens + max_texts * PAGE_TOKENS
    return max_tokens * row + slots * 2 * spec.hidden_size * 4 + threads * _THREAD_BYTES


def decoder_workspace_bytes(
    spec: DecoderSpec, max_tokens: int, max_texts: int, threads: int
) -> int:
    """Return what `workspace_bytes` does for a decoder that only reads."""
    attention, inner = decoder_widths(spec)
    mixer = next(iter(spec.attention_layers.values()))
    angles = len(distinct_ropes(spec)) * mixer.head_dim
    widest = max(spec.hidden_size, attention, inner)
    row = (_STREAMS * spec.hidden_size + 2 * attention + 2 * inner + angles + widest) * 4
    slots = max_tokens + max_texts * PAGE_TOKENS
    kept = slots * 2 * mixer.num_kv_heads * mixer.head_dim * 4
    return max_tokens * row + kept + threads * _THREAD_BYTES


def decoder_widths(spec: DecoderSpec) -> tuple[int, int]:
    """Return the elements of a token in a layer's queries, keys and values, and in its MLP."""
    mixer = next(iter(spec.attention_layers.values()))
    mlps = [layer.mlp for layer in spec.layers if layer.mlp is not None]
    heads = mixer.num_heads + 2 * mixer.num_kv_heads
    return heads * mixer.head_dim, 2 * max(mlp.intermediate_size for mlp in mlps)


def rotations(spec: EncoderSpec) -> list[RopeSpec | None]:
    """Return the kinds of rotation, each once; None stands for none."""
    return list(dict.fromkeys(layer.rope for layer in spec.layers))
