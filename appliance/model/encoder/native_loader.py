"""Lays an encoder out for the C library. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.kernels import arrays
from appliance.kernels.cpu.arena import Arena
from appliance.kernels.cpu.parts import LibraryLinear
from appliance.kernels.cpu.structs import (
    AttentionStruct,
    GatingStruct,
    LayerStruct,
    LinearStruct,
    ModelStruct,
    NormStruct,
    RopeStruct,
)
from appliance.kernels.cpu.weights import WeightPacker
from appliance.kernels.weights.weight import Packed, dense
from appliance.model.encoder.from_decoder import score_row
from appliance.model.encoder.native import TABLE_BITS, NativeEncoder, RankingHead, rotations
from appliance.model.linear import LinearPart
from appliance.model.narrowed import narrowed_matrix
from appliance.model.native_layout import ACTIVATIONS
from appliance.model.native_loader import load_native
from appliance.model.rope import Rope
from appliance.model.tensor_reader import FormatCounts, format_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.kernels.cpu.engine import NativeEngine
    from appliance.kernels.weights.weight import Weight
    from appliance.model.encoder.source import EncoderSource
    from appliance.model.native_loader import KeptWeights
    from appliance.model.source import ModelSource
    from appliance.model.spec import RopeSpec

# Of the norms whose output takes the place of the stream.
_ALL_NORMS, _FIRST_NORM = 1, 2


def load_native_encoder(
    source: EncoderSource,
    engine: NativeEngine,
    dtype: Any,
    bits: int | None,
    on_progress: Callable[[str, int, int], None],
) -> NativeEncoder:
    """Read the weights.

    Args:
        source: an encoder for which `why_unsupported` returns None.
        engine: lays out the weights and later executes them.
        dtype: of weights that are not rounded.
        bits: 8 or 4 to round the layers' matrices to, and the tokens' to 8; None rounds nothing.
        on_progress: called with stage, done, total.

    Raises:
        CheckpointError: a file changed since it was opened.
        MemoryError: the system has too little memory for the weights.
    """
    return _Loader(source, engine, dtype, bits).load(on_progress)


def load_native_decoder(
    source: ModelSource,
    engine: NativeEngine,
    dtype: Any,
    on_progress: Callable[[str, int, int], None],
    kept: KeptWeights | None = None,
) -> NativeEncoder:
    """Read the weights of a decoder that only reads; arguments and errors as for `load_native`."""
    native = load_native(source, engine, dtype, on_progress, kept=kept)
    for index in range(native.model.num_layers):
        native.model.layers[index].cache_layer = 0
    mixer = next(iter(source.spec.attention_layers.values()))
    return NativeEncoder(
        spec=source.spec,
        kv_heads=(mixer.num_kv_heads, mixer.head_dim),
        engine=engine,
        model=native.model,
        arena=native.arena,
        head=score_row(source),
        weight_format=native.weight_format,
    )


class _Loader:
    def __init__(
        self, source: EncoderSource, engine: NativeEngine, dtype: Any, bits: int | None
    ) -> None:
        self._source, self._spec, self._names = source, source.spec, source.names
        self._engine, self._dtype, self._bits = engine, dtype, bits
        self._arena = Arena()
        self._packer = WeightPacker(engine, self._arena, dtype)
        self._formats = FormatCounts()

    def load(self, on_progress: Callable[[str, int, int], None]) -> NativeEncoder:
        spec = self._spec
        count = len(spec.layers)
        layers = (LayerStruct * count)()
        for index in range(count):
            on_progress("weights", index, count)
            layers[index] = self._layer(index)
        on_progress("weights", count, count)
        ropes = rotations(spec)
        embedding = self._packer.linear(self._embedding())
        positions = self._positions()
        model = ModelStruct(
            hidden_size=spec.hidden_size,
            vocab_size=spec.vocab_size,
            num_layers=count,
            num_ropes=len(ropes),
            layers=layers,
            ropes=(RopeStruct * len(ropes))(*map(self._rope, ropes)),
            final_norm=self._norm(self._final_norm()),
            embedding=embedding,
            head=embedding,  # multiplies nothing; without one a step ends before the last norm
            embedding_scale=1.0,
            logit_scale=1.0,
            positions=LinearStruct() if positions is None else self._packer.linear(positions),
            norms_replace=_ALL_NORMS if spec.norms_follow else _FIRST_NORM,
        )
        return NativeEncoder(
            spec=spec,
            kv_heads=(spec.num_heads, spec.head_dim),
            engine=self._engine,
            model=model,
            arena=self._arena,
            head=self._head(),
            weight_format=self._formats.in_words(),
        )

    def _layer(self, index: int) -> LayerStruct:
        spec, names, own = self._spec, self._names, self._prefix(index)
        layer = spec.layers[index]
        struct = LayerStruct(
            gating=GatingStruct(activation=ACTIVATIONS[spec.activation]),
            mixer_norm=self._norm(self._first_norm(index)),
            mlp_norm=self._norm(
                own + (names.attention_norm if spec.norms_follow else names.mlp_norm)
            ),
        )
        parts = [self._linear(own + name, bias=spec.attention_bias) for name in names.qkv]
        struct.attention = AttentionStruct(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_heads,
            head_dim=spec.head_dim,
            window=0 if layer.reach is None else layer.reach + 1,
            scale=spec.head_dim**-0.5,
            rope=rotations(spec).index(layer.rope),
            num_qkv=len(parts),
            qkv=(LinearStruct * 4)(*parts),
            output=self._linear(own + names.attention_out, bias=spec.attention_bias),
            looks_ahead=1,
        )
        inner, parts_of = spec.intermediate_size, [(name, slice(None)) for name in names.up]
        if spec.gated and len(names.up) == 1:
            parts_of = [(names.up[0], slice(inner)), (names.up[0], slice(inner, None))]
        both = [self._linear(own + name, spec.up_bias, rows) for name, rows in parts_of]
        both = both[::-1] if spec.gate_last else both
        struct.gate = both[0]
        if spec.gated:
            struct.up = both[1]
        struct.down = self._linear(own + names.down, spec.down_bias)
        return struct

    def _first_norm(self, index: int) -> str | None:
        """Name the norm before a layer's attention: the one behind what came before, if it is."""
        if index == 0:
            return self._source.prefix + self._names.embedding_norm
        if self._spec.norms_follow:
            return self._prefix(index - 1) + self._names.mlp_norm
        has_norm = self._spec.layers[index].attention_norm
        return self._prefix(index) + self._names.attention_norm if has_norm else None

    def _final_norm(self) -> str:
        if self._spec.norms_follow:
            return self._prefix(len(self._spec.layers) - 1) + self._names.mlp_norm
        return self._source.prefix + self._names.final_norm

    def _prefix(self, index: int) -> str:
        return f"{self._source.prefix}{self._names.layer.format(index)}."

    def _embedding(self) -> Weight:
        """Return the tokens' rows, with that of the only type of token where no positions are."""
        spec, names, prefix = self._spec, self._names, self._source.prefix
        name = f"{prefix}{names.tokens}.weight"
        if spec.positions or not spec.token_types:
            return self._matrix(name, TABLE_BITS)
        kind = np.asarray(self._floats(f"{prefix}{names.token_types}.weight"))[0]
        rows = arrays.of_numpy(np.asarray(self._floats(name)) + kind)
        return rows if self._bits is None else narrowed_matrix(rows, TABLE_BITS)

    def _positions(self) -> Any:
        """Return what is added to embeddings: a row for each type of token and position."""
        spec, names, prefix = self._spec, self._names, self._source.prefix
        if not spec.positions:
            return None
        positions = self._floats(f"{prefix}{names.positions}.weight")
        if not spec.token_types:
            return positions
        types = self._floats(f"{prefix}{names.token_types}.weight")
        table = np.asarray(types)[:, None] + np.asarray(positions)[None]
        return arrays.of_numpy(table.reshape(-1, spec.hidden_size))

    def _rope(self, spec: RopeSpec | None) -> RopeStruct:
        if spec is None:
            return RopeStruct()
        rope = Rope.of(spec, self._spec.context_length, device=None)
        frequencies = self._packer.floats(rope.frequencies)
        return RopeStruct(spec.rotary_dim, rope.amplitude, frequencies)

    def _head(self) -> RankingHead | None:
        spec, names = self._spec, self._names
        if spec.ranking is None:
            return None
        packer = WeightPacker(self._engine, self._arena, "float32")

        def linear(name: str, *, bias: bool) -> LibraryLinear:
            weight = self._floats(f"{name}.weight")
            struct = packer.linear(weight, self._floats(f"{name}.bias") if bias else None)
            return LibraryLinear(self._engine, struct, self._arena)

        norm = None
        if spec.ranking.normed:
            weight, bias = self._norm_parts(names.head_norm)
            norm = np.asarray(weight), np.asarray(bias), spec.norm_eps
        dense = linear(names.dense.format(self._source.prefix), bias=spec.ranking.bias)
        return RankingHead(dense, norm, linear(names.classifier, bias=True))

    def _linear(self, name: str, bias: bool, rows: slice = slice(None)) -> LinearStruct:
        weight = self._matrix(f"{name}.weight", self._bits, rows)
        struct = self._packer.linear(weight, self._floats(f"{name}.bias")[rows] if bias else None)
        self._formats.add(format_of(weight, self._dtype, None, native=True), weight.nbytes)
        return struct

    def _matrix(self, name: str, bits: int | None, rows: slice = slice(None)) -> Weight:
        weight = self._source.load(name)
        if isinstance(weight, Packed):
            return weight if rows == slice(None) else LinearPart(weight, None).rows(rows).weight
        weight = weight[rows]
        return weight if self._bits is None or bits is None else narrowed_matrix(weight, bits)

    def _norm(self, name: str | None) -> NormStruct:
        if name is None:
            return NormStruct()
        weight, bias = self._norm_parts(name)
        return self._packer.norm(weight, self._spec.norm_eps, bias)

    def _norm_parts(self, name: str) -> tuple[Any, Any]:
        """Read a norm's weight and bias; without one the bias is 0: the mean is subtracted yet."""
        weight = self._floats(f"{name}.weight")
        if self._spec.norm_bias:
            return weight, self._floats(f"{name}.bias")
        return weight, arrays.of_numpy(np.zeros(len(weight), dtype=np.float32))

    def _floats(self, name: str) -> Any:
        return dense(self._source.load(name), "float32")
