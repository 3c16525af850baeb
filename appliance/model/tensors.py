"""Lists the tensors of a decoder with their names and shapes.

Knows no family: names are data, so that a safetensors folder and a GGUF file of one model differ
only in their `TensorNames`. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from appliance.model.spec import DecoderSpec, LayerSpec


class Role(Enum):
    """A tensor's part in the decoder."""

    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"
    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    QKV = "qkv"  # query, key and value rows, one after another
    OUTPUT = "output"
    GATE = "gate"
    UP = "up"
    GATE_UP = "gate_up"  # gate rows, then up rows
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names of a decoder's parts, without `.weight` or `.bias`; the defaults are the usual ones.

    `qkv` and `gate_up` list their sources in the order of the rows: three parts and two, or a
    single fused one. Names of parts that a spec does not have are not used.
    """

    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{}."
    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    output: str = "self_attn.o_proj"
    attention_post_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    mlp_post_norm: str = ""

    def in_layer(self, index: int, part: str) -> str:
        """Return the full name of a layer's part."""
        return self.layer.format(index) + part

    def linears(self, index: int) -> tuple[tuple[str, ...], ...]:
        """Return the full names of the weights of a layer's linears, in the order of use.

        Four linears: into the heads, out of them, into the MLP and out of it.
        """
        return tuple(
            tuple(f"{self.in_layer(index, part)}.weight" for part in parts)
            for parts in (self.qkv, (self.output,), self.gate_up, (self.down,))
        )


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """One tensor that a checkpoint must hold."""

    name: str
    shape: tuple[int, ...]  # (out_features, in_features), or (dim,) of a norm or bias
    role: Role
    layer: int | None = None  # None outside the layers

    @property
    def is_linear(self) -> bool:
        """True for the weight of a layer's linear, which a quantizer quantizes."""
        return self.layer is not None and len(self.shape) == 2


def tensor_slots(spec: DecoderSpec, names: TensorNames) -> list[TensorSlot]:
    """List every tensor of a decoder, in the order in which they are needed.

    The order depends only on the spec, so that lists with two sets of names can be zipped.
    """
    matrix = (spec.vocab_size, spec.hidden_size)
    slots = [TensorSlot(f"{names.embedding}.weight", matrix, Role.EMBEDDING)]
    for index, layer in enumerate(spec.layers):
        slots += _layer_slots(spec, names, index, layer)
    slots.append(TensorSlot(f"{names.final_norm}.weight", (spec.hidden_size,), Role.NORM))
    if not spec.tied_head:
        slots.append(TensorSlot(f"{names.head}.weight", matrix, Role.HEAD))
    return slots


def _layer_slots(
    spec: DecoderSpec, names: TensorNames, index: int, layer: LayerSpec
) -> Iterator[TensorSlot]:
    attention, mlp, hidden = layer.attention, layer.mlp, spec.hidden_size
    queries = attention.num_heads * attention.head_dim
    keys = attention.num_kv_heads * attention.head_dim
    middle = mlp.intermediate_size

    def norm(part: str, dim: int) -> TensorSlot:
        return TensorSlot(f"{names.in_layer(index, part)}.weight", (dim,), Role.NORM, index)

    def linear(part: str, role: Role, rows: int, columns: int, bias: bool) -> Iterator[TensorSlot]:
        name = names.in_layer(index, part)
        yield TensorSlot(f"{name}.weight", (rows, columns), role, index)
        if bias:
            yield TensorSlot(f"{name}.bias", (rows,), role, index)

    yield norm(names.attention_norm, hidden)
    parts = [(Role.QUERY, queries), (Role.KEY, keys), (Role.VALUE, keys)]
    if len(names.qkv) == 1:
        parts = [(Role.QKV, queries + 2 * keys)]
    for part, (role, rows) in zip(names.qkv, parts, strict=True):
        yield from linear(part, role, rows, hidden, attention.qkv_bias)
    if attention.qk_norm is not None:
        yield norm(names.query_norm, attention.head_dim)
        yield norm(names.key_norm, attention.head_dim)
    yield from linear(names.output, Role.OUTPUT, hidden, queries, attention.output_bias)
    if layer.post_norms:
        yield norm(names.attention_post_norm, hidden)
    yield norm(names.mlp_norm, hidden)
    parts = [(Role.GATE, middle), (Role.UP, middle)]
    if len(names.gate_up) == 1:
        parts = [(Role.GATE_UP, 2 * middle)]
    for part, (role, rows) in zip(names.gate_up, parts, strict=True):
        yield from linear(part, role, rows, hidden, mlp.bias)
    yield from linear(names.down, Role.DOWN, hidden, middle, mlp.bias)
    if layer.post_norms:
        yield norm(names.mlp_post_norm, hidden)
