"""Names of a decoder's tensors as plain data: the only difference between formats of one model.

Knows no family. Imports nothing of ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

_MODEL = "model."


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of a layer's experts, without `.weight` or `.bias` unless a comment says so.

    In `gate_up` and `down`, `{}` is the expert's index; without `{}`, one tensor stacks all
    experts.

    Attributes:
        stacked_gate_up: gate and up of all experts in one tensor, in some checkpoints.
        stacked_down: the same for down.
        stacked_apart: gate of all experts in one tensor, and up in another; in full.
        selection_bias_in_row: the bias of the choice is a matrix of one row.
        takes_turns: rows of gate and up alternate in such a tensor, instead of halves.
        transposed: such a tensor has inputs before outputs, if unquantized.
    """

    router: str = "mlp.gate"
    selection_bias: str = "mlp.gate.e_score_correction_bias"  # in full
    expert_scale: str = ""  # in full
    router_norm: str = ""  # in full; set with norms of its own, like the next three
    input_norm: str = ""
    shared_norm: str = ""
    output_norm: str = ""
    gate_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    down: str = "mlp.experts.{}.down_proj"
    shared_gate_up: tuple[str, ...] = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
    shared_down: str = "mlp.shared_expert.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    into_latent: str = ""
    out_of_latent: str = ""
    stacked_gate_up: str = "mlp.experts.gate_up_proj"
    stacked_down: str = "mlp.experts.down_proj"
    stacked_apart: tuple[str, str] | None = None
    selection_bias_in_row: bool = False
    takes_turns: bool = False
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class TokenInputNames:
    """Names of the per-layer inputs from tokens; the last three are within a layer."""

    embedding: str = ""
    projection: str = ""
    norm: str = ""
    gate: str = ""
    up: str = ""
    layer_norm: str = ""


@dataclass(frozen=True, slots=True)
class LatentNames:
    """Names of latent attention's parts, without `.weight` or `.bias`.

    `query` replaces the other three of queries.

    Attributes:
        keys: with `values`, replaces `heads`: stacks of each head's key linear, inputs before
            outputs, and value linear.
    """

    query: str = "self_attn.q_proj"
    query_down: str = "self_attn.q_a_proj"
    query_norm: str = "self_attn.q_a_layernorm"
    query_up: str = "self_attn.q_b_proj"
    token: str = "self_attn.kv_a_proj_with_mqa"
    norm: str = "self_attn.kv_a_layernorm"
    heads: str = "self_attn.kv_b_proj"
    keys: str = ""
    values: str = ""
    indexer: str = "self_attn.indexer"


@dataclass(frozen=True, slots=True)
class ShortConvNames:
    """Names of a short convolution's parts, without `.weight` or `.bias`."""

    input: str = "conv.in_proj"
    filter: str = "conv.conv"
    output: str = "conv.out_proj"


@dataclass(frozen=True, slots=True)
class GatedDeltaNames:
    """Names of Gated DeltaNet's parts; `log_rates` and `decay_bias` in full.

    Attributes:
        joined: replaces `qkv` and `gate`, if rows are grouped by key head.
        joined_rates: the same for `share` and `decay`.
    """

    qkv: str = "linear_attn.in_proj_qkv"
    gate: str = "linear_attn.in_proj_z"
    share: str = "linear_attn.in_proj_b"
    decay: str = "linear_attn.in_proj_a"
    filter: str = "linear_attn.conv1d"
    log_rates: str = "linear_attn.A_log"
    decay_bias: str = "linear_attn.dt_bias"
    norm: str = "linear_attn.norm"
    output: str = "linear_attn.out_proj"
    joined: str = ""
    joined_rates: str = ""


@dataclass(frozen=True, slots=True)
class Mamba2Names:
    """Names of Mamba-2's parts; `log_rates`, `step_bias` and `skip` in full."""

    input: str = "mamba.in_proj"
    filter: str = "mamba.conv1d"
    step_bias: str = "mamba.dt_bias"
    log_rates: str = "mamba.A_log"
    skip: str = "mamba.D"
    norm: str = "mamba.norm"
    output: str = "mamba.out_proj"


@dataclass(frozen=True, slots=True)
class JoinNames:
    """Full names, without `.weight`, of the parts that join embedding and hidden state.

    Without a linear, the first layer reads both halves (`LayerSpec.joins`), and the stream is the
    hidden state.

    Attributes:
        stream_is_normed: the stream is the normed hidden state.
    """

    token_norm: str
    hidden_norm: str
    linear: str = ""
    stream_is_normed: bool = False


@dataclass(frozen=True, slots=True)
class DraftHeadNames:
    """Names of a checkpoint's draft head (multi-token prediction), without `.weight`.

    `{first}` and `{last}` stand for the name prefix of the head's first and last layer. Without
    `kinds`, the head is one layer like the model's last attention layer.

    Attributes:
        count: setting with the number of heads.
        layer: as in `TensorNames`; empty: numbered after the model's layers.
        kinds: settings that list the kinds of the head's layers; the first one set counts.
        chains_normed: for further tokens, the hidden state is the stream after the last norm.
    """

    count: str = "num_nextn_predict_layers"
    layer: str = ""
    kinds: tuple[str, ...] = ()
    join: JoinNames = field(
        default_factory=lambda: JoinNames("{first}enorm", "{first}hnorm", "{first}eh_proj")
    )
    final_norm: str = "{last}shared_head.norm"
    chains_normed: bool = False


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names of a decoder's parts, without `.weight` or `.bias` unless a comment says so.

    The defaults are the usual names. `qkv` and `gate_up` list their sources in row order: three and
    two parts, or a single fused one; without gates `gate_up` is up alone. Names of parts that a
    spec lacks are not used.
    """

    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    positions: str = ""
    into_stream: str = ""  # maps embeddings of another width
    out_of_stream: str = ""
    head: str = "lm_head"
    score: str = "score"  # of a decoder that judges texts
    layer: str = "model.layers.{}."
    mixer_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qkv_by_key_head: bool = False  # rows are grouped by key head, with its queries
    rotated_pairs: bool = False  # rows of a head that rotate together are neighbours
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"  # in full
    head_gates: str = "self_attn.g_proj"
    output: str = "self_attn.o_proj"
    mixer_post_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    mlp_post_norm: str = ""
    experts: ExpertNames = field(default_factory=ExpertNames)
    output_scale: str = ""  # in full
    token_input: TokenInputNames = field(default_factory=TokenInputNames)
    latent: LatentNames = field(default_factory=LatentNames)
    short_conv: ShortConvNames = field(default_factory=ShortConvNames)
    gated_delta: GatedDeltaNames = field(default_factory=GatedDeltaNames)
    mamba2: Mamba2Names = field(default_factory=Mamba2Names)

    def under(self, prefix: str) -> TensorNames:
        """Return the names in a checkpoint with another prefix than `model.`.

        A prefix that ends in `.model.` applies to the head, too.
        """

        def moved(name: str) -> str:
            return prefix + name.removeprefix(_MODEL) if name.startswith(_MODEL) else name

        of_tokens = self.token_input
        outside = prefix.removesuffix(_MODEL) if prefix.endswith(f".{_MODEL}") else ""
        return replace(
            self,
            embedding=moved(self.embedding),
            final_norm=moved(self.final_norm),
            positions=moved(self.positions),
            into_stream=moved(self.into_stream),
            out_of_stream=moved(self.out_of_stream),
            head=outside + self.head,
            layer=moved(self.layer),
            token_input=replace(
                of_tokens,
                embedding=moved(of_tokens.embedding),
                projection=moved(of_tokens.projection),
                norm=moved(of_tokens.norm),
            ),
        )

    @property
    def outside_layers(self) -> tuple[str, ...]:
        """Names of the parts that are in no layer."""
        tokens = self.token_input
        parts = (
            self.embedding,
            self.final_norm,
            self.positions,
            self.into_stream,
            self.out_of_stream,
            self.head,
            tokens.embedding,
            tokens.projection,
            tokens.norm,
        )
        return tuple(part for part in parts if part)

    def in_layer(self, index: int, part: str) -> str:
        return self.layer.format(index) + part

    def linears(self, index: int) -> tuple[tuple[str, ...], ...]:
        """Return the full names of a layer's linear weights, in the order of use.

        Four linears: into the heads, out of them, into the MLP and out of it.
        """
        return tuple(
            tuple(f"{self.in_layer(index, part)}.weight" for part in parts)
            for parts in (self.qkv, (self.output,), self.gate_up, (self.down,))
        )
