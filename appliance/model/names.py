"""Names of a decoder's tensors as plain data, so that formats of one model differ in nothing else.

Knows no family. Imports nothing of ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

_MODEL = "model."


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of a layer's experts, without `.weight` or `.bias`, except where a comment says so.

    `gate_up` and `down` hold the number of an expert in place of `{}`; without `{}` one tensor
    holds those of all experts, one after another.

    Attributes:
        stacked_gate_up: gate and up of all experts in one tensor, in some checkpoints.
        stacked_down: the same of down.
        takes_turns: rows of gate and of up take turns in such a tensor; else halves.
        transposed: such a tensor of plain weights has inputs before outputs.
    """

    router: str = "mlp.gate"
    selection_bias: str = "mlp.gate.e_score_correction_bias"  # in full
    expert_scale: str = ""  # in full
    router_norm: str = ""  # in full; with norms of its own, like the next three
    input_norm: str = ""
    shared_norm: str = ""
    output_norm: str = ""
    gate_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    down: str = "mlp.experts.{}.down_proj"
    shared_gate_up: tuple[str, ...] = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
    shared_down: str = "mlp.shared_expert.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    stacked_gate_up: str = "mlp.experts.gate_up_proj"
    stacked_down: str = "mlp.experts.down_proj"
    takes_turns: bool = False
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class TokenInputNames:
    """Names of what tokens add after each layer; the last three in a layer."""

    embedding: str = ""
    projection: str = ""
    norm: str = ""
    gate: str = ""
    up: str = ""
    layer_norm: str = ""


@dataclass(frozen=True, slots=True)
class LatentNames:
    """Names of latent attention's parts, without `.weight` or `.bias`; `query` stands alone.

    Attributes:
        keys: with `values` stands for `heads`, where each head's linear of keys, inputs before
            outputs, and each head's linear of values are stacks of their own.
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


@dataclass(frozen=True, slots=True)
class ShortConvNames:
    """Names of a short convolution's parts, without `.weight` or `.bias`."""

    input: str = "conv.in_proj"
    filter: str = "conv.conv"
    output: str = "conv.out_proj"


@dataclass(frozen=True, slots=True)
class GatedDeltaNames:
    """Names of Gated DeltaNet's parts; full ones of `log_rates` and `decay_bias`.

    Attributes:
        joined: stands for `qkv` and `gate`, where rows of a key head lie together.
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
    """Names of Mamba-2's parts; full ones of `log_rates`, `step_bias` and `skip`."""

    input: str = "mamba.in_proj"
    filter: str = "mamba.conv1d"
    step_bias: str = "mamba.dt_bias"
    log_rates: str = "mamba.A_log"
    skip: str = "mamba.D"
    norm: str = "mamba.norm"
    output: str = "mamba.out_proj"


@dataclass(frozen=True, slots=True)
class JoinNames:
    """Full names of what joins an embedding and a hidden state, without `.weight`.

    Without a linear the first layer reads both halves (`LayerSpec.joins`), and the stream is the
    hidden state.

    Attributes:
        stream_is_normed: it is that under its norm.
    """

    token_norm: str
    hidden_norm: str
    linear: str = ""
    stream_is_normed: bool = False


@dataclass(frozen=True, slots=True)
class DraftHeadNames:
    """Names of a checkpoint's head that drafts (multi-token prediction), without `.weight`.

    In them `{first}` and `{last}` stand for the beginning of the names in the head's first and last
    layer. Without a setting of the kinds the head is one layer like the last one that attends.

    Attributes:
        count: setting with the number of heads.
        layer: as in `TensorNames`; empty: the layers go on behind the model's.
        kinds: settings that list the kinds of the head's layers, the first that is set counts.
        chains_normed: a further token's hidden state is the stream under the last norm.
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
    """Names of a decoder's parts, without `.weight` or `.bias`, except where a comment says so.

    The defaults are the usual ones. `qkv` and `gate_up` list their sources in the order of the
    rows: three parts and two, or a single fused one; without gates `gate_up` is up alone. Names of
    parts that a spec does not have are not used.
    """

    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    positions: str = ""
    into_stream: str = ""  # from embeddings of another width, and back
    out_of_stream: str = ""
    head: str = "lm_head"
    layer: str = "model.layers.{}."
    mixer_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qkv_by_key_head: bool = False  # rows of one key head and of its queries lie together
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"  # in full
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
        """Return the names in a checkpoint that has another prefix than `model.`.

        A prefix that ends in `.model.` comes before the head, too.
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
