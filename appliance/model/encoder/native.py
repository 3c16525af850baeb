"""Runs an encoder in the C library, all texts of a step in one call, and counts its bytes before.

An encoder is a decoder there whose queries see what follows them, too. Keys and values of a layer
are read before the next layer's are written, so all layers share one small cache in float32.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.kernels import arrays
from appliance.kernels.cpu.cache import PAGE_TOKENS, StepCache
from appliance.kernels.cpu.engine import check
from appliance.kernels.cpu.step_structs import BatchStruct
from appliance.model.encoder.spec import EncoderSpec, HeadActivation, RankingSpec, encoder_slots
from appliance.model.native import HEAD_WIDTH_STEP, MOST_HEAD_WIDTH
from appliance.model.rope import distinct_ropes

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from appliance.kernels.cpu.arena import Arena
    from appliance.kernels.cpu.engine import NativeEngine
    from appliance.kernels.cpu.parts import LibraryLinear
    from appliance.kernels.cpu.structs import ModelStruct
    from appliance.model.encoder.source import EncoderSource
    from appliance.model.encoder.texts import Texts
    from appliance.model.spec import DecoderSpec, RopeSpec, ScoreSpec

    Activate = Callable[[NDArray[np.float32]], NDArray[Any]]

TABLE_BITS = 8  # of tokens' embeddings, where matrices are rounded
# The library's workspace: streams of hidden states (before and after a norm, QKV, heads' output,
# forms in 8 bits), and what attention keeps for a thread.
_STREAMS, _THREAD_BYTES = 8, 1 << 20
_ERF = np.vectorize(math.erf, otypes=[np.float32])
_ACTIVATIONS: dict[HeadActivation, Activate] = {
    HeadActivation.TANH: np.tanh,
    HeadActivation.RELU: lambda x: np.maximum(x, np.float32(0)),
    HeadActivation.GELU: lambda x: x * 0.5 * (1.0 + _ERF(x * np.float32(0.5**0.5))),
}


@dataclass(slots=True)
class NativeEncoder:
    """An encoder, or a decoder that only reads, in the library's layout.

    Activations are float32.

    Attributes:
        kv_heads: number and width of a layer's key heads, the same in all layers.
        model: points into `arena`; all of its layers use cache 0.
        head: judges texts, of a decoder by one row (hidden_size,); None without one.
        weight_format: in words.
    """

    spec: EncoderSpec | DecoderSpec
    kv_heads: tuple[int, int]
    engine: NativeEngine
    model: ModelStruct
    arena: Arena
    head: RankingHead | NDArray[np.float32] | None
    weight_format: str
    _cache: StepCache = field(init=False)

    def __post_init__(self) -> None:
        self._cache = StepCache(self.engine.library, self.kv_heads)

    @property
    def ranking(self) -> RankingSpec | ScoreSpec | None:
        return self.spec.ranking if isinstance(self.spec, EncoderSpec) else self.spec.score

    @property
    def num_token_types(self) -> int:
        return self.spec.token_types if isinstance(self.spec, EncoderSpec) else 0

    @property
    def weight_bytes(self) -> int:
        return self.arena.nbytes

    def hidden(self, texts: Texts) -> NDArray[np.float32]:
        """Return the hidden states of all tokens, (num_tokens, hidden_size).

        Raises:
            MemoryError: the texts need more workspace than there is.
        """
        lengths = np.asarray(texts.lengths, dtype=np.int32)
        blocks = -(-lengths // PAGE_TOKENS)
        firsts = np.cumsum(blocks, dtype=np.int32) - blocks
        table = firsts[:, None] + np.arange(blocks.max(), dtype=np.int32)
        slots = np.repeat(firsts * PAGE_TOKENS, lengths) + texts.positions
        positions = self._positions(texts)
        starts = texts.starts
        tokens = np.ascontiguousarray(texts.ids)
        hidden = np.empty((len(tokens), self.spec.hidden_size), dtype=np.float32)
        batch = BatchStruct(
            num_tokens=len(tokens),
            num_seqs=len(lengths),
            table_width=table.shape[1],
            num_rows=len(tokens),
            token_ids=tokens.ctypes.data,
            positions=positions.ctypes.data,
            slot_mapping=slots.ctypes.data,
            query_start=starts.ctypes.data,
            context_lens=lengths.ctypes.data,
            block_tables=table.ctypes.data,
        )
        cache = self._cache.room_for(int(blocks.sum()))
        check(
            self.engine.library.ap_step(
                self.engine.handle,
                ctypes.byref(self.model),
                ctypes.byref(cache.struct),
                ctypes.byref(batch),
                hidden.ctypes.data,
                None,
            )
        )
        return hidden

    def rank(self, chosen: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the head's logit of each pair, (num_pairs,).

        Args:
            chosen: (num_pairs, hidden_size), the states that the spec has judged.
        """
        ranking, head = self.ranking, self.head
        if isinstance(head, np.ndarray):
            logits: NDArray[np.float32] = chosen @ head
            return logits
        assert isinstance(ranking, RankingSpec)
        assert head is not None
        x = _ACTIVATIONS[ranking.activation](_through(head.dense, chosen))
        if head.norm is not None:
            weight, bias, eps = head.norm
            x = x - x.mean(-1, keepdims=True)
            x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight + bias
        return _through(head.classifier, x)[:, 0]

    def _positions(self, texts: Texts) -> NDArray[np.int64]:
        """Return rows of the table of positions, which has one for each type of token."""
        if not isinstance(self.spec, EncoderSpec) or not self.spec.positions:
            return np.ascontiguousarray(texts.positions)
        return texts.types * self.spec.positions + self.spec.first_position + texts.positions


@dataclass(frozen=True, slots=True)
class RankingHead:
    """A head that judges pairs; a few rows in float32.

    Attributes:
        norm: weight and bias (hidden_size,) and epsilon; None without one.
    """

    dense: LibraryLinear
    norm: tuple[NDArray[np.float32], NDArray[np.float32], float] | None
    classifier: LibraryLinear


def _through(linear: LibraryLinear, x: NDArray[np.float32]) -> NDArray[np.float32]:
    found: NDArray[np.float32] = np.asarray(linear(arrays.of_numpy(x)))
    return found


def why_unsupported(spec: EncoderSpec) -> str | None:
    """Say why the C library does not cover an encoder; None if it does."""
    if spec.head_dim % HEAD_WIDTH_STEP or spec.head_dim > MOST_HEAD_WIDTH:
        return (
            f"its heads have {spec.head_dim} elements; the CPU library covers multiples of"
            f" {HEAD_WIDTH_STEP} up to {MOST_HEAD_WIDTH}"
        )
    if spec.experts is not None:
        return "its layers have experts"
    if spec.distance_buckets or spec.slopes:
        return "its scores have biases by distance"
    if not spec.norms_follow and spec.layers[0].attention_norm:
        return "its first layer norms the embedding twice"
    if spec.token_types > 1 and spec.ranking is not None and not spec.positions:
        return "it tells texts of a pair apart without learned positions"
    return None


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
