"""Labels of GGUF files whose models transformers' modules run, as llama.cpp's converter makes them.

Sources: llama.cpp's conversion/*.py and src/models/*.cpp, and transformers' classes.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from appliance.errors import CheckpointError
from appliance.model.fallback.from_gguf import GGUFClass
from appliance.model.families.gguf_config import (
    gguf_biases,
    gguf_layer_types,
    gguf_mamba2,
    num_layers,
    of_layers,
)
from appliance.model.gguf_tensors import FREQUENCY_DIVISORS

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.gguf import GGUFFile
    from appliance.model.families.reader import ConfigReader

_LAYER = "model.layers.{layer}."
_ENDS = {"token_embd": "model.embed_tokens", "output": "lm_head"}
_ATTENTION = {
    "blk.attn_q": _LAYER + "self_attn.q_proj",
    "blk.attn_k": _LAYER + "self_attn.k_proj",
    "blk.attn_v": _LAYER + "self_attn.v_proj",
    "blk.attn_output": _LAYER + "self_attn.o_proj",
    "blk.attn_q_norm": _LAYER + "self_attn.q_norm",
    "blk.attn_k_norm": _LAYER + "self_attn.k_norm",
}


def _mlp(module: str) -> dict[str, str]:
    return {f"blk.ffn_{part}": f"{_LAYER}{module}.{part}_proj" for part in ("gate", "up", "down")}


def _stored_shape(file: GGUFFile, name: str) -> tuple[int, ...]:
    if name not in file.tensor_names():
        raise CheckpointError(f"{file.path} has no {name}; use another file of the model")
    return file.shape(name)


# --- Gemma 3n: several streams (AltUp), learned residuals (LAuReL), inputs of each layer ---------

_OWN_KV_LAYERS = 20  # of both models that there are


def _gemma3n(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    layers = num_layers(meta)
    widths = of_layers(meta, "feed_forward_length")
    scales = meta.numbers("activation_sparsity_scale", layers)
    bases = {
        "full_attention": meta.number("rope.freq_base", 1e6),
        "sliding_attention": meta.number("rope.freq_base_swa", 1e4),
    }
    return {
        "intermediate_size": list(widths) * (layers if len(widths) == 1 else 1),
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": meta.integer("attention.sliding_window"),
        "layer_types": gguf_layer_types(meta, 5),
        "num_kv_shared_layers": meta.integer(
            "attention.shared_kv_layers", max(0, layers - _OWN_KV_LAYERS)
        ),
        "final_logit_softcapping": meta.number("final_logit_softcapping", 30.0),
        "altup_active_idx": meta.integer("altup.active_idx", 0),
        "altup_num_inputs": meta.integer("altup.num_inputs"),
        "hidden_size_per_layer_input": meta.integer("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": _stored_shape(file, "per_layer_token_embd.weight")[0],
        "laurel_rank": _stored_shape(file, "blk.0.laurel_l.weight")[0],
        # Kept as quantiles of the normal distribution, which class and converter compute.
        "activation_sparsity_pattern": [round(NormalDist().cdf(scale), 6) for scale in scales],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in bases.items()
        },
    }


GEMMA3N = GGUFClass(
    architecture="Gemma3nForCausalLM",
    model_type="gemma3n_text",
    config=_gemma3n,
    names=_ENDS
    | _ATTENTION
    | _mlp("mlp")
    | {
        "output_norm": "model.norm",
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
        "altup_proj": "model.altup_projections.{part}",
        "altup_unembd_proj": "model.altup_unembed_projections.{part}",
        "blk.attn_norm": _LAYER + "input_layernorm",
        "blk.post_attention_norm": _LAYER + "post_attention_layernorm",
        "blk.ffn_norm": _LAYER + "pre_feedforward_layernorm",
        "blk.post_ffw_norm": _LAYER + "post_feedforward_layernorm",
        "blk.altup_correct_coef": _LAYER + "altup.correction_coefs",
        "blk.altup_predict_coef": _LAYER + "altup.prediction_coefs",
        "blk.altup_router": _LAYER + "altup.modality_router",
        "blk.altup_router_norm": _LAYER + "altup.router_norm",
        "blk.laurel_l": _LAYER + "laurel.linear_left",
        "blk.laurel_r": _LAYER + "laurel.linear_right",
        "blk.laurel_post_norm": _LAYER + "laurel.post_laurel_norm",
        "blk.inp_gate": _LAYER + "per_layer_input_gate",
        "blk.proj": _LAYER + "per_layer_projection",
        "blk.post_norm": _LAYER + "post_per_layer_input_norm",
    },
    whole={"blk.altup_correct_scale.weight": _LAYER + "altup.correct_output_scale"},
)


# --- Falcon H1: attention and Mamba-2 side by side; its multipliers are in the file's weights -----


def _falcon_h1(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    mamba, names = gguf_mamba2(meta, file, 0), file.tensor_names()
    ones = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
    return {
        "hidden_act": "silu",
        **gguf_biases(file, attention="attention_bias", mlp="mlp_bias"),
        "mamba_d_ssm": meta.integer("ssm.inner_size"),
        "mamba_n_heads": mamba["heads"],
        "mamba_d_head": mamba["head_dim"],
        "mamba_n_groups": mamba["groups"],
        "mamba_d_state": mamba["state"],
        "mamba_d_conv": mamba["taps"],
        "mamba_conv_bias": mamba["filter_bias"],
        "mamba_proj_bias": mamba["bias"],
        "projectors_bias": "blk.0.ssm_out.bias" in names,
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in names,
        "mamba_norm_before_gate": False,
        "ssm_multipliers": [1.0] * 5,
        "mlp_multipliers": [1.0] * 2,
        **{f"{name}_multiplier": 1.0 for name in ones},
    }


def _rates(tensor: Tensor) -> Tensor:
    return (-tensor).log().flatten()


def _vector(tensor: Tensor) -> Tensor:
    return tensor.flatten()


def _filter(tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(1)


FALCON_H1 = GGUFClass(
    architecture="FalconH1ForCausalLM",
    model_type="falcon_h1",
    config=_falcon_h1,
    names=_ENDS
    | _ATTENTION
    | _mlp("feed_forward")
    | {
        "output_norm": "model.final_layernorm",
        "blk.attn_norm": _LAYER + "input_layernorm",
        "blk.ffn_norm": _LAYER + "pre_ff_layernorm",
        "blk.ssm_in": _LAYER + "mamba.in_proj",
        "blk.ssm_conv1d": _LAYER + "mamba.conv1d",
        "blk.ssm_norm": _LAYER + "mamba.norm",
        "blk.ssm_out": _LAYER + "mamba.out_proj",
    },
    whole={
        "blk.ssm_dt.bias": _LAYER + "mamba.dt_bias",
        "blk.ssm_a": _LAYER + "mamba.A_log",
        "blk.ssm_d": _LAYER + "mamba.D",
    },
    changes={
        "blk.ssm_a": _rates,
        "blk.ssm_d": _vector,
        "blk.ssm_norm.weight": _vector,
        "blk.ssm_conv1d.weight": _filter,
    },
)


# --- Apertus: an activation with numbers of its own (xIELU), which are among the settings ---------

_XIELU = _LAYER + "mlp.act_fn."


def _apertus(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    return {
        "hidden_act": "xielu",
        **gguf_biases(file, attention="attention_bias"),
        "rope_scaling": None,
        "rope_parameters": _llama3(meta, file),
    }


def _llama3(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    """Return the settings of Llama 3.1's scaling of rotary frequencies, from what divides them."""
    theta = meta.number("rope.freq_base", 10000.0)
    if FREQUENCY_DIVISORS not in file.tensor_names():
        return {"rope_type": "default", "rope_theta": theta}
    divisors: list[float] = file.load(FREQUENCY_DIVISORS).tolist()  # type: ignore[union-attr]
    found = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": max(divisors),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    usual = (_divisor(found, theta ** (-pair / len(divisors))) for pair in range(len(divisors)))
    if not all(map(lambda a, b: math.isclose(a, b, rel_tol=1e-3), usual, divisors)):
        raise CheckpointError(
            f"{file.path}: {FREQUENCY_DIVISORS} is not as Llama 3.1's scaling by"
            f" {max(divisors):g} has it; serve the folder that the file was made from"
        )
    return found


def _divisor(scaling: dict[str, Any], frequency: float) -> float:
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high, factor = (scaling[key] for key in ("low_freq_factor", "high_freq_factor", "factor"))
    share = min(1.0, max(0.0, (turns - low) / (high - low)))
    return float(1 / ((1 - share) / factor + share))


APERTUS = GGUFClass(
    architecture="ApertusForCausalLM",
    model_type="apertus",
    config=_apertus,
    names=_ENDS
    | _ATTENTION
    | _mlp("mlp")
    | {
        "output_norm": "model.norm",
        "blk.attn_norm": _LAYER + "attention_layernorm",
        "blk.ffn_norm": _LAYER + "feedforward_layernorm",
    },
    numbers={
        "xielu.alpha_p": (_XIELU + "alpha_p", (1,)),
        "xielu.alpha_n": (_XIELU + "alpha_n", (1,)),
        "xielu.beta": (_XIELU + "beta", ()),
        "xielu.eps": (_XIELU + "eps", ()),
    },
)

# By the label of their files, `general.architecture`.
GGUF_CLASSES = {"gemma3n": GEMMA3N, "falcon-h1": FALCON_H1, "apertus": APERTUS}
