"""The torch decoder: executes a `DecoderSpec` with the operations of one backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from appliance.kernels.decoder_cache import KVCache, allocate_layer
from appliance.kernels.kv_cache import KVFormat, LayerPrecision, precisions
from appliance.model.step import Step

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from appliance.kernels.backend import Backend, Linear
    from appliance.kernels.ragged import RaggedBatch
    from appliance.model.embedding import Embedding
    from appliance.model.layers import DecoderLayer
    from appliance.model.norm import Norm
    from appliance.model.rope import Rope
    from appliance.model.spec import DecoderSpec


def _ignore() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model whose weights are laid out for one backend; it holds no cache.

    Attributes:
        spec: what it computes.
        dtype: of activations.
        device: where the weights are.
        ropes: the distinct kinds of RoPE, in the order that the layers count them.
        first_norm: of the embedding, before the first layer.
        weight_bytes: bytes that the weights take as they are laid out.
        weight_format: in words, such as "4 bits (groups of 32), head 8 bits".
        on_layer: called after each layer, for whoever watches a long step.
    """

    spec: DecoderSpec
    backend: Backend
    dtype: torch.dtype
    device: torch.device
    embedding: Embedding
    ropes: tuple[Rope, ...]
    first_norm: Norm
    layers: tuple[DecoderLayer, ...]
    head: Linear
    weight_bytes: int
    weight_format: str
    on_layer: Callable[[], None] = _ignore

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: RaggedBatch,
        cache: KVCache,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run one step and leave its keys and values in the cache.

        Args:
            token_ids: (num_tokens,) int64, all sequences' rows one after another.
            positions: (num_tokens,) int64, each row's place in its sequence.
            batch: which rows belong to which sequence, and their blocks.
            cache: the blocks.
            rows: (num_rows,) int64, the rows whose logits are wanted, perhaps none; None means
                all of them.

        Returns:
            Logits, (num_rows, vocab_size) float32.
        """
        step = Step(
            batch=batch,
            attention_work=self.backend.plan_attention(batch, cache.block_size),
            rotations=tuple(rope.rotation(positions) for rope in self.ropes),
        )
        stream = self.embedding(token_ids)  # (num_tokens, hidden_size)
        hidden = self.backend.rms_norm(stream, self.first_norm.weight, self.first_norm.eps)
        last = len(self.layers) - 1
        for index, (layer, blocks) in enumerate(zip(self.layers, cache.layers, strict=True)):
            hidden, stream = layer(hidden, stream, step, blocks, rows if index == last else None)
            self.on_layer()
        if not hidden.shape[0]:
            return hidden.new_empty((0, self.spec.vocab_size), dtype=torch.float32)
        logits = self.head(hidden)  # (num_rows, vocab_size)
        cap = self.spec.logit_softcap
        return logits.float() if cap is None else self.backend.soft_cap(logits, cap)

    def allocate_cache(
        self,
        format: KVFormat | Sequence[LayerPrecision],
        *,
        num_blocks: int,
        block_size: int,
        num_open: int = 0,
    ) -> KVCache:
        """Fresh blocks for every layer, and open pages for those that are sealed."""
        return KVCache(
            tuple(
                allocate_layer(
                    self.backend.allocate_cache,
                    precision,
                    num_blocks=num_blocks,
                    block_size=block_size,
                    num_open=num_open,
                    num_kv_heads=layer.attention.num_kv_heads,
                    head_dim=layer.attention.head_dim,
                    device=self.device,
                )
                for layer, precision in zip(
                    self.spec.layers, precisions(format, len(self.spec.layers)), strict=True
                )
            )
        )
