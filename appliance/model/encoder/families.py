"""Reads the configs of encoders: BERT, RoBERTa and those like it, ModernBERT, GTE, Nomic, Jina."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from appliance.errors import UnsupportedModelError
from appliance.kernels.activation import Activation
from appliance.model.encoder.spec import (
    EncoderExpertsSpec,
    EncoderLayerSpec,
    EncoderNames,
    EncoderSpec,
    HeadActivation,
    RankingSpec,
)
from appliance.model.families.reader import ConfigReader, class_defaults
from appliance.model.families.rope import (
    read_rope,
    rope_section,
    scaled_rope,
    section_of_layers,
)
from appliance.model.spec import RopeScaling, RopeSpec
from appliance.model_files.rankers import check_labels, is_ranker

if TYPE_CHECKING:
    from collections.abc import Sequence

# Of their classes, which no setting changes.
_DISTILBERT_EPS, _MPNET_BUCKETS, _MPNET_FIRST = 1e-12, 32, 2
_ACTIVATIONS = {
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "silu": Activation.SILU,
}


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """Encoders with the same config and tensor names.

    Attributes:
        model_type: of its Hugging Face configs.
        read: builds the spec; the flag says that there is a ranking head.
        other_names: for checkpoints whose first layer has a linear by these.
    """

    model_type: str
    read: Callable[[ConfigReader, bool], EncoderSpec]
    names: EncoderNames
    other_names: EncoderNames | None = None


def _read_bert(config: ConfigReader, ranks: bool) -> EncoderSpec:
    return _bert(config, "bert", 0, ranks)


def _read_distilbert(config: ConfigReader, ranks: bool) -> EncoderSpec:
    positions = config.integer("max_position_embeddings")
    own = config.with_value("hidden_act", config.text("activation"))
    own = own.with_value("layer_norm_eps", _DISTILBERT_EPS)
    own = own.with_value("intermediate_size", config.integer("hidden_dim"))
    return EncoderSpec(
        architecture="distilbert",
        context_length=positions,
        **_common(own, "hidden_act", "layer_norm_eps"),
        layers=(EncoderLayerSpec(),) * config.integer("num_hidden_layers"),
        positions=positions,
        ranking=RankingSpec(HeadActivation.RELU) if ranks else None,
    )


def _read_mpnet(config: ConfigReader, ranks: bool) -> EncoderSpec:
    if config.integer("relative_attention_num_buckets") != _MPNET_BUCKETS:
        raise config.refuse("relative_attention_num_buckets", str(_MPNET_BUCKETS))
    positions = config.integer("max_position_embeddings")
    return EncoderSpec(
        architecture="mpnet",
        context_length=positions - _MPNET_FIRST,
        **_common(config, "hidden_act", "layer_norm_eps"),
        layers=(EncoderLayerSpec(),) * config.integer("num_hidden_layers"),
        positions=positions,
        first_position=_MPNET_FIRST,
        distance_buckets=_MPNET_BUCKETS,
        ranking=RankingSpec(HeadActivation.TANH) if ranks else None,
    )


def _read_roberta(config: ConfigReader, ranks: bool) -> EncoderSpec:
    # Rows up to that of the padding token stand for no position.
    return _bert(config, "xlm-roberta", config.integer("pad_token_id") + 1, ranks)


def _bert(config: ConfigReader, architecture: str, first: int, ranks: bool) -> EncoderSpec:
    if config.value("lora_adaptations"):
        raise UnsupportedModelError(
            f"{config.origin}: lora_adaptations are adapters within the weights, which only Jina's "
            "own code reads; use jinaai/jina-embeddings-v3-hf, the same model in transformers' form"
        )
    kind = config.text("position_embedding_type", "absolute")
    if kind == "alibi" and architecture == "bert":
        return _sloped(config, ranks)
    if kind != "absolute":
        raise config.refuse("position_embedding_type", "absolute")
    if config.flag("is_decoder"):
        raise config.refuse("is_decoder", "false")
    positions = config.integer("max_position_embeddings")
    if first >= positions:
        raise config.refuse("pad_token_id", f"less than {positions}")
    return EncoderSpec(
        architecture=architecture,
        context_length=positions - first,
        **_common(config, "hidden_act", "layer_norm_eps"),
        layers=(EncoderLayerSpec(),) * config.integer("num_hidden_layers"),
        positions=positions,
        first_position=first,
        token_types=config.integer("type_vocab_size"),
        ranking=RankingSpec(HeadActivation.TANH) if ranks else None,
    )


def _sloped(config: ConfigReader, ranks: bool) -> EncoderSpec:
    """Read Jina 2, which is BERT with ALiBi and gates; only its maker has its class."""
    if config.text("feed_forward_type", "original") != "geglu":
        raise config.refuse("feed_forward_type", "geglu")
    if "qk-post-norm" in str(config.value("auto_map")):
        raise UnsupportedModelError(
            f"{config.origin}: auto_map names Jina's second form (qk-post-norm), which norms"
            " queries and keys as well and is not read; use jinaai/jina-embeddings-v3-hf, or"
            " Jina 2 in English"
        )
    return EncoderSpec(
        architecture="jina-bert-v2",
        context_length=config.integer(
            "model_max_length", config.integer("max_position_embeddings")
        ),
        **_common(config, "hidden_act", "layer_norm_eps"),
        layers=(EncoderLayerSpec(),) * config.integer("num_hidden_layers"),
        token_types=config.integer("type_vocab_size"),
        slopes=True,
        gated=True,
        up_bias=False,
        ranking=RankingSpec(HeadActivation.TANH) if ranks else None,
    )


def _read_modernbert(config: ConfigReader, ranks: bool) -> EncoderSpec:
    num_layers = config.integer("num_hidden_layers")
    kinds = config.value("layer_types") or _every_nth(config, num_layers)
    fits = isinstance(kinds, list) and len(kinds) == num_layers
    if not fits or not {*kinds} <= {"full_attention", "sliding_attention"}:
        raise config.refuse(
            "layer_types", f"one of both kinds for each of num_hidden_layers, {num_layers}"
        )
    ropes = config.section("rope_parameters")
    reach = config.integer("local_attention") // 2
    common = _common(config, "hidden_activation", "norm_eps")
    head_dim = common["hidden_size"] // common["num_heads"]
    # Older files name bases beside the kinds of layers.
    far, near = (
        scaled_rope(config, section_of_layers(ropes, kind), older, head_dim)
        for kind, older in (
            ("full_attention", "global_rope_theta"),
            ("sliding_attention", "local_rope_theta"),
        )
    )
    pooling = config.text("classifier_pooling")
    if ranks and pooling not in ("cls", "mean"):
        raise config.refuse("classifier_pooling", "cls or mean")
    if ranks and config.text("classifier_activation") != "gelu":
        raise config.refuse("classifier_activation", "gelu")
    ranking = RankingSpec(
        HeadActivation.GELU,
        mean=pooling == "mean",
        normed=True,
        bias=config.flag("classifier_bias"),
    )
    return EncoderSpec(
        architecture="modernbert",
        context_length=config.integer("max_position_embeddings"),
        **common,
        layers=tuple(
            EncoderLayerSpec(
                reach=None if kind == "full_attention" else reach,
                rope=far if kind == "full_attention" else near,
                attention_norm=index > 0,
            )
            for index, kind in enumerate(kinds)
        ),
        norms_follow=False,
        gated=True,
        norm_bias=config.flag("norm_bias"),
        attention_bias=config.flag("attention_bias"),
        up_bias=config.flag("mlp_bias"),
        down_bias=config.flag("mlp_bias"),
        ranking=ranking if ranks else None,
    )


def _read_jina(config: ConfigReader, ranks: bool) -> EncoderSpec:
    return _rotated(config, "jina-embeddings-v3", ranks)


def _read_gte(config: ConfigReader, ranks: bool) -> EncoderSpec:
    for key, usual in _GTE_USUAL.items():
        if config.value(key, usual) != usual:
            raise config.refuse(key, str(usual))
    return _rotated(config, "gte", ranks, gated=True, gate_last=True, up_bias=False)


def _read_nomic(config: ConfigReader, ranks: bool) -> EncoderSpec:
    for key, usual in _NOMIC_USUAL.items():
        if config.value(key, usual) != usual:
            raise config.refuse(key, str(usual))
    kind = config.text("activation_function", "swiglu")
    if kind not in ("swiglu", "gelu"):
        raise config.refuse("activation_function", "swiglu, gelu")
    biases = {own: config.flag(key, False) for own, key in _NOMIC_BIASES.items()}
    if kind == "swiglu":
        for key in ("moe_every_n_layers", "num_experts"):
            if config.value(key, 0):
                raise config.refuse(key, "0 beside swiglu")
        return _rotated(config, "nomic-bert", ranks, gated=True, **biases)
    spec = _rotated(config.with_value("hidden_act", kind), "nomic-bert", ranks, **biases)
    every = config.integer("moe_every_n_layers", 0)
    if every < 2:
        if every:
            raise config.refuse("moe_every_n_layers", "0, or 2 and more")
        return spec
    experts = EncoderExpertsSpec(config.integer("num_experts"), config.integer("moe_top_k"))
    if experts.chosen > experts.count:
        raise config.refuse("moe_top_k", f"at most num_experts, {experts.count}")
    layers = (replace(layer, routed=i % every == 1) for i, layer in enumerate(spec.layers))
    return replace(spec, layers=tuple(layers), experts=experts)


def _rotated(config: ConfigReader, architecture: str, ranks: bool, **form: Any) -> EncoderSpec:
    """Read an encoder as BERT that turns queries and keys instead of adding positions."""
    common = _common(config, "hidden_act", "layer_norm_eps")
    head_dim = common["hidden_size"] // common["num_heads"]
    if config.integer("head_dim", head_dim) != head_dim:
        raise config.refuse("head_dim", f"hidden_size / num_attention_heads = {head_dim}")
    section = rope_section(config)
    is_ntk = section.text("type", "default") == "ntk"
    rope = _ntk(config, section, head_dim) if is_ntk else read_rope(config, head_dim)
    return EncoderSpec(
        architecture=architecture,
        context_length=config.integer("max_position_embeddings"),
        **common,
        layers=(EncoderLayerSpec(rope=rope),) * config.integer("num_hidden_layers"),
        token_types=config.integer("type_vocab_size"),
        ranking=RankingSpec(HeadActivation.TANH) if ranks else None,
        **form,
    )


def _ntk(config: ConfigReader, section: ConfigReader, head_dim: int) -> RopeSpec:
    """Read GTE's fixed scaling: a base that is larger by `factor`, and lower frequencies.

    From the code that comes with gte-base-en-v1.5, after https://kexue.fm/archives/9706.
    """
    if section.value("mixed_b") is not None:
        raise section.refuse("mixed_b", "null")
    section.value("type")
    section.refuse_unknown(frozenset({"factor", "mixed_b"}))
    factor = max(1.0, section.number("factor"))
    return RopeSpec(
        theta=config.number("rope_theta") * factor,
        rotary_dim=head_dim,
        scaling=RopeScaling.LINEAR,
        factor=factor ** (2 / head_dim),
    )


# Of the code that came with checkpoints before transformers had the class.
_GTE_USUAL = {"position_embedding_type": "rope", "layer_norm_type": "layer_norm",
              "logn_attention_scale": False, "pack_qkv": True}  # fmt: skip
_NOMIC_USUAL: dict[str, Any] = {
    "prenorm": False, "causal": False, "parallel_block": False,
    "use_rms_norm": False,
    "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None,
    "num_shared_experts": 0, "expert_choice_router": False, "moe_normalize_expert_weights": False,
    "ffn_div": 1,
}  # fmt: skip
_NOMIC_BIASES = {
    "attention_bias": "qkv_proj_bias", "up_bias": "mlp_fc1_bias", "down_bias": "mlp_fc2_bias"
}  # fmt: skip
_NOMIC_OLD_NAMES = {
    "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size", "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta", "max_trained_positions": "max_position_embeddings",
}  # fmt: skip


def _common(config: ConfigReader, act: str, eps: str) -> dict[str, Any]:
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if hidden_size % num_heads:
        whole = f"{config.written('hidden_size')}, {hidden_size}"
        raise config.refuse("num_attention_heads", f"a divisor of {whole}")
    if config.text(act) not in _ACTIVATIONS:
        raise config.refuse(act, ", ".join(_ACTIVATIONS))
    return {
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "vocab_size": config.integer("vocab_size"),
        "intermediate_size": config.integer("intermediate_size"),
        "activation": _ACTIVATIONS[config.text(act)],
        "norm_eps": config.number(eps),
    }


def _every_nth(config: ConfigReader, num_layers: int) -> list[str]:
    every = config.integer("global_attn_every_n_layers")
    return ["sliding_attention" if i % every else "full_attention" for i in range(num_layers)]


_BERT_NAMES = EncoderNames(
    prefixes=("", "bert."),
    tokens="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    token_types="embeddings.token_type_embeddings",
    embedding_norm="embeddings.LayerNorm",
    layer="encoder.layer.{}",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    attention_out="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up=("intermediate.dense",),
    down="output.dense",
    mlp_norm="output.LayerNorm",
    dense="{}pooler.dense",
    classifier="classifier",
    unused=("cls.", "pooler.", "bert.pooler.", "embeddings.position_ids", "bert.embeddings.pos"),
)
_JINA2_NAMES = replace(
    _BERT_NAMES, up=("mlp.gated_layers",), down="mlp.wo", mlp_norm="mlp.layernorm"
)
_ROBERTA_NAMES = EncoderNames(
    prefixes=("", "roberta."),
    tokens=_BERT_NAMES.tokens,
    positions=_BERT_NAMES.positions,
    token_types=_BERT_NAMES.token_types,
    embedding_norm=_BERT_NAMES.embedding_norm,
    layer=_BERT_NAMES.layer,
    qkv=_BERT_NAMES.qkv,
    attention_out=_BERT_NAMES.attention_out,
    attention_norm=_BERT_NAMES.attention_norm,
    up=_BERT_NAMES.up,
    down=_BERT_NAMES.down,
    mlp_norm=_BERT_NAMES.mlp_norm,
    dense="classifier.dense",
    classifier="classifier.out_proj",
    unused=("lm_head.", "pooler.", "roberta.pooler.", "embeddings.pos", "roberta.embeddings.pos"),
)
_MODERNBERT_NAMES = EncoderNames(
    prefixes=("", "model."),
    tokens="embeddings.tok_embeddings",
    embedding_norm="embeddings.norm",
    layer="layers.{}",
    qkv=("attn.Wqkv",),
    attention_out="attn.Wo",
    attention_norm="attn_norm",
    up=("mlp.Wi",),
    down="mlp.Wo",
    mlp_norm="mlp_norm",
    final_norm="final_norm",
    dense="head.dense",
    head_norm="head.norm",
    classifier="classifier",
    unused=("head.", "decoder."),
)

_DISTILBERT_NAMES = EncoderNames(
    prefixes=("", "distilbert."),
    tokens=_BERT_NAMES.tokens,
    positions=_BERT_NAMES.positions,
    embedding_norm=_BERT_NAMES.embedding_norm,
    layer="transformer.layer.{}",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    attention_out="attention.out_lin",
    attention_norm="sa_layer_norm",
    up=("ffn.lin1",),
    down="ffn.lin2",
    mlp_norm="output_layer_norm",
    dense="pre_classifier",
    classifier="classifier",
    unused=("vocab_", "embeddings.position_ids", "distilbert.embeddings.position_ids"),
)
_MPNET_NAMES = replace(
    _ROBERTA_NAMES,
    prefixes=("", "mpnet."),
    distances="encoder.relative_attention_bias",
    qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    attention_out="attention.attn.o",
    attention_norm="attention.LayerNorm",
    unused=("lm_head.", "pooler.", "mpnet.pooler.", "embeddings.pos", "mpnet.embeddings.pos"),
)
# As Jina's own code names them.
_FLASH_NAMES = EncoderNames(
    prefixes=("", "roberta."),
    tokens=_BERT_NAMES.tokens,
    positions=_BERT_NAMES.positions,
    token_types=_BERT_NAMES.token_types,
    embedding_norm="emb_ln",
    layer="encoder.layers.{}",
    qkv=("mixer.Wqkv",),
    attention_out="mixer.out_proj",
    attention_norm="norm1",
    up=("mlp.fc1",),
    down="mlp.fc2",
    mlp_norm="norm2",
    dense="classifier.dense",
    classifier="classifier.out_proj",
    unused=("lm_head.", "pooler.", "roberta.pooler."),
)
_JINA_NAMES = replace(_FLASH_NAMES, positions="")
_GTE_NAMES = EncoderNames(
    prefixes=("", "new.", "gte."),
    tokens=_BERT_NAMES.tokens,
    token_types=_BERT_NAMES.token_types,
    embedding_norm=_BERT_NAMES.embedding_norm,
    layer="encoder.layer.{}",
    qkv=("attention.qkv_proj",),
    attention_out="attention.o_proj",
    attention_norm="attn_ln",
    up=("mlp.up_gate_proj",),
    down="mlp.down_proj",
    mlp_norm="mlp_ln",
    dense="{}pooler.dense",
    classifier="classifier",
    unused=("lm_head.", "pooler.", "new.pooler.", "gte.pooler."),
)
_NOMIC_NAMES = EncoderNames(
    prefixes=("", "bert.", "nomic_bert."),
    tokens=_BERT_NAMES.tokens,
    token_types=_BERT_NAMES.token_types,
    embedding_norm="emb_ln",
    layer="encoder.layers.{}",
    qkv=("attn.Wqkv",),
    attention_out="attn.out_proj",
    attention_norm="norm1",
    up=("mlp.fc12", "mlp.fc11"),
    down="mlp.fc2",
    mlp_norm="norm2",
    dense="{}pooler.dense",
    classifier="classifier",
    unused=("cls.", "pooler.", "bert.pooler.", "nomic_bert.pooler."),
)
_NOMIC_UNGATED_NAMES = replace(
    _NOMIC_NAMES,
    up=("mlp.fc1",),
    router="mlp.router.layer",
    expert_up="mlp.experts.mlp.w1",
    expert_down="mlp.experts.mlp.w2",
    expert_bias="mlp.experts.bias",
)

ENCODERS: Sequence[EncoderFamily] = (
    EncoderFamily("bert", _read_bert, _BERT_NAMES, _JINA2_NAMES),
    EncoderFamily("roberta", _read_roberta, _ROBERTA_NAMES),
    EncoderFamily("xlm-roberta", _read_roberta, _ROBERTA_NAMES, _FLASH_NAMES),
    EncoderFamily("camembert", _read_roberta, _ROBERTA_NAMES),
    EncoderFamily("jina_embeddings_v3", _read_jina, _JINA_NAMES),
    EncoderFamily("gte", _read_gte, _GTE_NAMES),
    EncoderFamily("new", _read_gte, _GTE_NAMES),  # of the code before transformers' class
    EncoderFamily("nomic_bert", _read_nomic, _NOMIC_NAMES, _NOMIC_UNGATED_NAMES),
    EncoderFamily("distilbert", _read_distilbert, _DISTILBERT_NAMES),
    EncoderFamily("mpnet", _read_mpnet, _MPNET_NAMES),
    EncoderFamily("modernbert", _read_modernbert, _MODERNBERT_NAMES),
)


# Encoders and embedders that people have and no code here computes, by model_type.
_RELATIVE = "its scores have biases by relative position"
_UNREAD = {
    **dict.fromkeys(("deberta", "deberta-v2", "t5"), _RELATIVE),
    "albert": "its layers share their weights",
    "electra": "its embeddings are narrower than its layers",
    "neobert": "transformers has no class of it, and code that comes with a checkpoint is not run",
}


def why_unread(config: Mapping[str, Any]) -> str:
    """Say why a config's encoder is not served; empty if it is, or is no encoder that is known."""
    why = _UNREAD.get(str(config.get("model_type")), "")
    served = ", ".join(family.model_type for family in ENCODERS)
    return why and f"it is an encoder, and {why}; choose one among {served}"


def find_encoder(config: Mapping[str, Any]) -> EncoderFamily | None:
    """Find the family of a Hugging Face config by its `model_type`; None if it is no encoder."""
    return next((one for one in ENCODERS if one.model_type == config.get("model_type")), None)


def read_encoder(
    family: EncoderFamily, config: Mapping[str, Any], origin: str
) -> tuple[ConfigReader, EncoderSpec]:
    """Read the settings and what they describe; `origin` names their file in messages.

    Raises:
        CheckpointError: a setting is missing, of the wrong type or out of range.
        UnsupportedModelError: a setting asks for arithmetic that no code here has.
    """
    ranks = is_ranker(config)
    if ranks:
        check_labels(config, origin)
    if config.get("quantization_config") is not None:
        raise UnsupportedModelError(
            f"{origin}: quantization_config is not supported in an encoder; take the checkpoint "
            "that is not quantized"
        )
    if family.model_type == "nomic_bert":
        older = {_NOMIC_OLD_NAMES.get(key, key): value for key, value in config.items()}
        config = {**older, **{key: config[key] for key in older.keys() & config.keys()}}
    reader = ConfigReader(config, origin, class_defaults(family.model_type))
    spec = family.read(reader, ranks)
    reader.refuse_unread()
    return reader, spec
