"""Llama 4: attention in chunks, layers without positions, experts that read weighed inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.errors import CheckpointError
from appliance.kernels.head_norms import HeadNormKind
from appliance.kernels.routing import Scoring
from appliance.model.families.experts import read_experts
from appliance.model.families.family import Family, GGUFMapping
from appliance.model.families.gguf_config import (
    GGUF_NAMES,
    gguf_biases,
    gguf_config,
    gguf_experts,
)
from appliance.model.families.rope import read_rope, without_positions
from appliance.model.families.standard import (
    read_attention,
    read_decoder,
    read_head_dim,
    read_layer_kinds,
)
from appliance.model.names import ExpertNames, TensorNames
from appliance.model.spec import MLPSpec, NormSpec

if TYPE_CHECKING:
    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec, ExpertsSpec, RopeSpec

_BLOCK = 32  # tokens of the largest KV block, at which chunks must begin
_GGUF_CHUNK = 8192  # of both published models, whose files do not say it
_WITHOUT_HEAD_NORMS = 128  # experts of Maverick, by which llama.cpp tells it from Scout


def _read(config: ConfigReader) -> DecoderSpec:
    count, head_dim = config.integer("num_hidden_layers"), read_head_dim(config)
    turns, chunk = _read_turning(config, count), _read_chunk(config)
    kinds = {"chunked_attention": True, "full_attention": False}
    chunked = read_layer_kinds(config, kinds, count)
    if chunked is None:
        chunked = [turning and chunk is not None for turning in turns]
    if any(chunked) and chunk is None:
        raise config.refuse("attention_chunk_size", "a number, as layers attend in chunks")
    rope, still = read_rope(config, head_dim), _read_still(config, head_dim)
    bias = config.flag("attention_bias")
    norm = None
    if config.flag("use_qk_norm"):
        norm = NormSpec(config.number("rms_norm_eps"), weight=False)
    usual = read_attention(
        config,
        rope,
        head_dim,
        qkv_bias=bias,
        output_bias=bias,
        head_norms=HeadNormKind.ROTATED,
    )
    attention = [
        replace(
            usual,
            rope=rope if turning else still,
            qk_norm=norm if turning else None,
            chunk=chunk if within else None,
        )
        for turning, within in zip(turns, chunked, strict=True)
    ]
    return read_decoder(config, "llama4", attention, mlps=_read_mlps(config, count))


def _read_turning(config: ConfigReader, count: int) -> list[bool]:
    """Read which layers rotate: 1 in `no_rope_layers` means that one does."""
    listed = config.value("no_rope_layers")
    interval = config.integer("no_rope_layer_interval")
    if listed is None or listed == []:
        return [(index + 1) % interval != 0 for index in range(count)]
    fits = isinstance(listed, list) and len(listed) >= count
    if not fits or any(each not in (0, 1) for each in listed):
        wanted = f"a list of num_hidden_layers = {count} numbers, 0 or 1"
        raise config.refuse("no_rope_layers", wanted)
    return [bool(each) for each in listed[:count]]


def _read_chunk(config: ConfigReader) -> int | None:
    if config.value("attention_chunk_size") is None:
        return None
    chunk = config.integer("attention_chunk_size")
    if chunk % _BLOCK:
        raise config.refuse("attention_chunk_size", f"a multiple of {_BLOCK}, a block of the cache")
    return chunk


def _read_still(config: ConfigReader, head_dim: int) -> RopeSpec:
    """Read the settings of layers without positions, whose queries grow with theirs."""
    still = without_positions(head_dim)
    beta, context = config.number("attn_scale"), config.integer("floor_scale")
    if not config.value("attn_temperature_tuning"):
        return still
    return replace(still, query_beta=beta, original_context=context, query_shift=1)


def _read_mlps(config: ConfigReader, count: int) -> list[MLPSpec | ExpertsSpec | None]:
    experts = read_experts(
        config,
        count="num_local_experts",
        width="intermediate_size",
        scoring=Scoring.SIGMOID,
        renormalize=False,
        shared_width=config.integer("intermediate_size"),
    )
    assert experts.shared is not None
    sparse = replace(experts, weighs_inputs=True)
    dense = replace(experts.shared, intermediate_size=config.integer("intermediate_size_mlp"))
    listed, step = config.value("moe_layers"), config.integer("interleave_moe_layer_step")
    if listed is None:
        listed = list(range(step - 1, count, step))
    if not isinstance(listed, list) or any(type(each) is not int for each in listed):
        raise CheckpointError(
            f"{config.origin}: moe_layers is {str(listed)[:80]}, but must list layers from 0 to "
            f"{count - 1}; take the config.json of its makers"
        )
    return [sparse if index in listed else dense for index in range(count)]


def _gguf(file: GGUFFile) -> dict[str, Any]:
    return gguf_config(file, "llama4", _gguf_extra)


def _gguf_extra(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    """Read what files say; the rest is as llama.cpp has it for Scout and Maverick."""
    if meta.value("expert_count") is None:
        raise meta.refuse("expert_count", "1 or more")
    experts = gguf_experts(meta, "num_local_experts")
    # A window of 0 says that all layers attend everywhere and rotate (MobileLLM).
    window = file.metadata.get("llama4.attention.sliding_window")
    chunk = meta.integer("attention.chunk_size", _GGUF_CHUNK)  # which Ollama's converter writes
    if window and meta.integer("attention.sliding_window") != chunk:
        raise meta.refuse("attention.sliding_window", f"{chunk}, as attention has chunks")
    everywhere = {
        "no_rope_layers": [1] * meta.integer("block_count"),
        "attention_chunk_size": None,
        "attn_temperature_tuning": False,
    }
    return (
        {
            "hidden_act": "silu",
            "intermediate_size": experts.pop("moe_intermediate_size", None),
            "intermediate_size_mlp": meta.integer("feed_forward_length"),
            "interleave_moe_layer_step": meta.integer("interleave_moe_layer_step"),
            "use_qk_norm": experts["num_local_experts"] != _WITHOUT_HEAD_NORMS,
            "attention_chunk_size": chunk,
        }
        | gguf_biases(file, attention="attention_bias")
        | experts
        | (everywhere if window == 0 else {})
    )


LLAMA4 = Family(
    name="llama4",
    model_type="llama4_text",
    architectures=("Llama4ForCausalLM",),
    read=_read,
    names=TensorNames(
        rotated_pairs=True,
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        experts=ExpertNames(
            router="feed_forward.router",
            gate_up=("feed_forward.experts.{}.gate_proj", "feed_forward.experts.{}.up_proj"),
            down="feed_forward.experts.{}.down_proj",
            shared_gate_up=(
                "feed_forward.shared_expert.gate_proj",
                "feed_forward.shared_expert.up_proj",
            ),
            shared_down="feed_forward.shared_expert.down_proj",
            stacked_gate_up="feed_forward.experts.gate_up_proj",
            stacked_down="feed_forward.experts.down_proj",
            transposed=True,
        ),
    ),
    gguf=GGUFMapping("llama4", _gguf, replace(GGUF_NAMES, rotated_pairs=True)),
)
