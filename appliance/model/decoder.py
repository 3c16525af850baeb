"""The torch decoder: executes a `DecoderSpec` with one backend's operations."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from appliance.kernels.cache.decoder_cache import KVCache, allocate_layer
from appliance.kernels.cache.kv_format import KVFormat, LayerPrecision, precisions
from appliance.kernels.rows.state_spans import StateSpans
from appliance.model.adapters.torch_slots import AdaptedRows, TorchAdapterSlots
from appliance.model.attention import Attention, LatentAttention
from appliance.model.executor import heads_of, state_views
from appliance.model.experts import Experts
from appliance.model.shard.weights import own_precisions, own_targets
from appliance.model.spec import LatentAttentionSpec
from appliance.model.step import Step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from appliance.kernels.operations import Backend, Linear
    from appliance.kernels.rows.ragged import RaggedBatch
    from appliance.model.adapters.targets import AdapterTarget
    from appliance.model.embedding import Embedding, TokenInputs
    from appliance.model.host_experts import HostCalls
    from appliance.model.layers import DecoderLayer, MixerCache
    from appliance.model.norm import Norm
    from appliance.model.prompt_layers import PromptLayers
    from appliance.model.rope import Rope
    from appliance.model.shard.joint import PartialEmbedding
    from appliance.model.shard.shard import Shard
    from appliance.model.spec import DecoderSpec


def _ignore() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model with weights laid out for one backend; it holds no cache.

    Attributes:
        dtype: of activations.
        token_inputs: per-layer inputs from tokens.
        ropes: distinct kinds of RoPE, in the order of the layers' indices.
        first_norm: of the embedding, before the first layer; None if there is none.
        positions: learned position embeddings, added to the tokens'.
        weight_bytes: as laid out, without weights in host memory.
        num_dense: weights that became dense because the cut for a rank cut a block.
        weight_format: in words, such as "4 bits (groups of 32), head 8 bits".
        shard: the part of a model that this is; None: it is all of it.
        on_layer: called after each layer, to show progress in a long step.
        prompts: the layers for steps with prompts; None: the same.
    """

    spec: DecoderSpec
    backend: Backend
    dtype: torch.dtype
    device: torch.device
    embedding: Embedding | PartialEmbedding
    ropes: tuple[Rope, ...]
    first_norm: Norm | None
    layers: tuple[DecoderLayer, ...]
    head: Linear
    token_inputs: TokenInputs | None
    positions: Embedding | None
    weight_bytes: int
    weight_format: str
    num_dense: int = 0
    shard: Shard | None = None
    on_layer: Callable[[], None] = _ignore
    prompts: PromptLayers | None = None

    @property
    def is_enqueued(self) -> bool:
        layers = [layer.mlp for layer in self.layers if isinstance(layer.mlp, Experts)]
        # Chunks are cut by the host's numbers.
        return not self.spec.chunks and all(mlp.is_enqueued for mlp in layers)

    @property
    def host_calls(self) -> HostCalls | None:
        """The host's own parts of a step; None without experts in host memory."""
        layers = [layer.mlp for layer in self.layers if isinstance(layer.mlp, Experts)]
        return next((mlp.host_calls for mlp in layers if mlp.host_calls is not None), None)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: RaggedBatch,
        cache: KVCache,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run one step; see `Executor.forward`."""
        return self.logits(self.hidden(token_ids, positions, batch, cache, rows))

    @torch.inference_mode()
    def hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: RaggedBatch,
        cache: KVCache,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run one step up to the head; see `Executor.hidden`."""
        after = self.after_each_layer(token_ids, positions, batch, cache, rows)
        ((hidden, _),) = deque(after, maxlen=1)
        return hidden

    def after_each_layer(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: RaggedBatch,
        cache: KVCache,
        rows: Tensor | None = None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Run one step up to the head, layer by layer.

        Yields:
            What the next layer, or the head, reads, and the stream: (num_tokens, hidden_size) each,
            after the last layer of `rows` alone.
        """
        stream = self.embedding(token_ids)  # (num_tokens, hidden_size)
        given = batch.given
        if given is not None:
            stream = given.instead_of(stream)
        if self.positions is not None:
            stream = stream + self.positions(positions)
        step = Step(
            batch=batch,
            attention_work=self.backend.plan_attention(batch, cache.block_size),
            chunked_work={
                chunk: self.backend.plan_attention(
                    batch.within_chunks(chunk, cache.block_size), cache.block_size
                )
                for chunk in self.spec.chunks
            },
            rotations=tuple(rope.rotation(positions, batch.axes) for rope in self.ropes),
            query_scales=tuple(rope.query_scale(positions) for rope in self.ropes),
            token_inputs=None
            if self.token_inputs is None
            else self.token_inputs(token_ids, stream),
            spans=StateSpans.of(batch) if cache.recurrent else None,
            adapted=AdaptedRows.of(batch, self.backend),
        )
        first = self.first_norm
        hidden = stream if first is None else first.of(stream, self.backend)
        last, layers = len(self.layers) - 1, self.layers
        if self.prompts is not None and batch.prompts_from is not None:
            layers = self.prompts.behind(batch.prompts_from)
        for index, layer in enumerate(layers):
            kept: MixerCache | None = None
            if layer.cache_place is not None:
                attends = isinstance(layer.mixer, Attention | LatentAttention)
                caches = cache.layers if attends else cache.recurrent
                kept = caches[layer.cache_place]
            hidden, stream = layer(hidden, stream, step, kept, rows if index == last else None)
            if given is not None and index < given.num_addends:
                stream = given.added(stream, index)
                hidden = layer.normed(stream)
            self.on_layer()
            yield hidden, stream

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Run the head; see `Executor.logits`."""
        if not hidden.shape[0]:
            return hidden.new_empty((0, self.spec.vocab_size), dtype=torch.float32)
        logits = self.head(hidden)  # (num_rows, vocab_size); none of other ranks than 0
        if not logits.shape[0]:
            return logits.float()
        cap, scale = self.spec.logit_softcap, self.spec.logit_scale
        if scale != 1.0:
            logits = logits.float() * scale
        return logits.float() if cap is None else self.backend.soft_cap(logits, cap)

    def adapter_slots(
        self, targets: Mapping[str, AdapterTarget], count: int, most_ranks: int
    ) -> TorchAdapterSlots:
        if self.shard is not None:
            targets = own_targets(targets, self.shard)
        return TorchAdapterSlots(targets, self.device, self.dtype, count, most_ranks)

    def allocate_cache(
        self,
        format: KVFormat | Sequence[LayerPrecision],
        *,
        num_blocks: int,
        block_size: int,
        num_open: int = 0,
        num_states: int = 0,
    ) -> KVCache:
        """Allocate blocks, open blocks and state slots; see `Executor.allocate_cache`."""
        layers = precisions(format, len(self.spec.cache_layers))
        return allocate_cache(
            self.backend,
            self.spec,
            self.device,
            layers if self.shard is None else own_precisions(layers, self.shard),
            num_blocks=num_blocks,
            block_size=block_size,
            num_open=num_open,
            num_states=num_states,
        )


def allocate_cache(
    backend: Backend,
    spec: DecoderSpec,
    device: torch.device,
    format: KVFormat | Sequence[LayerPrecision],
    *,
    num_blocks: int,
    block_size: int,
    num_open: int = 0,
    num_states: int = 0,
) -> KVCache:
    """Allocate a backend's cache of a decoder; see `Executor.allocate_cache`."""
    heads = heads_of(spec)
    states = torch.zeros((num_states, spec.state_bytes), dtype=torch.uint8, device=device)
    return KVCache(
        tuple(
            allocate_layer(
                backend.allocate_cache,
                precision,
                num_blocks=num_blocks,
                block_size=block_size,
                num_open=num_open,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                device=device,
                in_rows=isinstance(mixer, LatentAttentionSpec),
            )
            for mixer, (num_kv_heads, head_dim), precision in zip(
                spec.cache_layers.values(), heads, precisions(format, len(heads)), strict=True
            )
        ),
        states=states,
        recurrent=state_views(spec, states),
    )
