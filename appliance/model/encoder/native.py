"""Runs an encoder in the C library: all texts of a step in one call. Imports no torch.

An encoder is a decoder there whose queries see what follows them, too. Keys and values of a layer
are read before the next layer's are written, so all layers share one small cache in float32.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.kernels import arrays
from appliance.kernels.cpu.cache import PAGE_TOKENS, NativeCache
from appliance.kernels.cpu.engine import check
from appliance.kernels.cpu.step_structs import BatchStruct
from appliance.kernels.kv_format import KVFormat
from appliance.model.encoder.spec import EncoderSpec, HeadActivation, RankingSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from appliance.kernels.cpu.arena import Arena
    from appliance.kernels.cpu.engine import NativeEngine
    from appliance.kernels.cpu.parts import LibraryLinear
    from appliance.kernels.cpu.structs import ModelStruct
    from appliance.model.encoder.texts import Texts
    from appliance.model.spec import DecoderSpec, ScoreSpec

    Activate = Callable[[NDArray[np.float32]], NDArray[Any]]

_ERF = np.vectorize(math.erf, otypes=[np.float32])
_ACTIVATIONS: dict[HeadActivation, Activate] = {
    HeadActivation.TANH: np.tanh,
    HeadActivation.RELU: lambda x: np.maximum(x, np.float32(0)),
    HeadActivation.GELU: lambda x: x * 0.5 * (1.0 + _ERF(x * np.float32(0.5**0.5))),
}


@dataclass(frozen=True, slots=True)
class RankingHead:
    """A head that judges pairs; a few rows in float32.

    Attributes:
        norm: weight and bias (hidden_size,) and epsilon; None without one.
    """

    dense: LibraryLinear
    norm: tuple[NDArray[np.float32], NDArray[np.float32], float] | None
    classifier: LibraryLinear


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
    _cache: NativeCache | None = field(default=None, init=False)

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
        cache = self._room_for(int(blocks.sum()))
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

    def _room_for(self, num_blocks: int) -> NativeCache:
        if self._cache is None or self._cache.num_blocks < num_blocks:
            self._cache = None  # before the larger one is there
            self._cache = NativeCache(
                self.engine.library,
                KVFormat.FP32,
                [self.kv_heads],
                num_blocks=num_blocks,
                block_size=PAGE_TOKENS,
            )
        return self._cache


def _through(linear: LibraryLinear, x: NDArray[np.float32]) -> NDArray[np.float32]:
    found: NDArray[np.float32] = np.asarray(linear(arrays.of_numpy(x)))
    return found
