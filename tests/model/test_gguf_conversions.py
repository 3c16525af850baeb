"""GGUF files of newer families as llama.cpp's converter makes them, under gguf's own names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from support.gguf.gguf_conversions import architecture_of, gguf_settings, gguf_tensors
from support.gguf.gguf_files import write_gguf_file
from support.models.centered_models import CENTERED
from support.models.expert_models import EXPERTS
from support.models.recurrent_models import RECURRENT, logits_in_steps
from support.models.relatives import RELATIVES

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.gguf import GGUFFile
from appliance.kernels.backend import REFERENCE
from appliance.model.fallback.gguf_classes import GGUF_CLASSES
from appliance.model.families.registry import FAMILIES, NO_MODELS, UNREAD_GGUF, family_of_gguf
from appliance.model.gguf_weights import GGUFWeights
from appliance.model.loader import load_decoder
from appliance.model.source import open_model
from appliance.model.tensors import Role

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

SIZES = {"head_dim": 16, "hidden_size": 64, "num_attention_heads": 4}
GROWING = dict(EXPERTS["mistral4"][1]["rope_parameters"])  # a config adds its own settings to these
# Like Granite 4 Micro, without recurrent layers but with their settings.
ATTENDS = {
    "layer_types": ["full_attention"] * 3,
    "position_embedding_type": "rope",
    "shared_intermediate_size": 76,
    "intermediate_size": 76,
}
GRANITE = {
    key: value
    for key, value in EXPERTS["granitemoe"][1].items()
    if key.endswith(("multiplier", "scaling"))
}
SMALL_GEMMA4 = {
    "num_hidden_layers": 6,
    "global_head_dim": 32,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 99,
    "final_logit_softcapping": 3.0,
}
EQUAL_SCALES = EXPERTS["deepseek_v3"][1]["rope_parameters"] | {"mscale": 1.2}
# Settings that files cannot state have the values of existing models.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", RECURRENT["qwen3_next"][1] | {"mlp_only_layers": []}),
    "mistral4": (
        "mistral4",
        EXPERTS["mistral4"][1] | {"rope_parameters": GROWING | {"llama_4_scaling_beta": 0.1}},
    ),
    "ministral3": ("ministral3", {"sliding_window": None, "rope_parameters": GROWING}),
    "deepseek_v2": EXPERTS["deepseek_v2"],
    "deepseek_v2-groups": EXPERTS["deepseek_v2-groups"],
    "deepseek_v3": (
        "deepseek_v3",
        EXPERTS["deepseek_v3"][1] | {"attention_bias": False, "rope_parameters": EQUAL_SCALES},
    ),
    "glm4_moe_lite": EXPERTS["glm4_moe_lite"],
    "granite": ("granite", GRANITE),
    "granitemoe": EXPERTS["granitemoe"],
    "granite4": RECURRENT["granite4"],
    "granite4-dense": (
        "granitemoehybrid",
        RECURRENT["granite4-dense"][1] | {"position_embedding_type": "nope"},
    ),
    "granite4-attends": ("granitemoehybrid", RECURRENT["granite4-dense"][1] | ATTENDS),
    "granite4-attends-moe": ("granitemoehybrid", RECURRENT["granite4"][1] | ATTENDS),
    "bamba": RECURRENT["bamba"],
    "nemotron_h": (
        "nemotron_h",
        RECURRENT["nemotron_h"][1]
        | {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
    ),
    "nemotron_h-latent": RECURRENT["nemotron_h-latent"],
    "gemma4": EXPERTS["gemma4"],
    "gemma4-small": ("gemma4_text", SMALL_GEMMA4),
    "mixtral": EXPERTS["mixtral"],
    "dots1": (
        "dots1",
        EXPERTS["dots1"][1] | {"n_group": 1, "topk_group": 1, "sliding_window": None},
    ),
    "ernie4_5_moe": EXPERTS["ernie4_5_moe"],
    "llama4-everywhere": (
        "llama4_text",
        EXPERTS["llama4-two"][1]
        | {"layer_types": ["full_attention"] * 3, "no_rope_layers": [1] * 3, "use_qk_norm": True},
    ),
    # The temperature has the value that files cannot state.
    "llama4": ("llama4_text", EXPERTS["llama4"][1] | {"floor_scale": 8192, "attn_scale": 0.1}),
    "falcon": CENTERED["falcon"],
    "falcon-new": ("falcon", CENTERED["falcon-new"][1]),
    "phi": CENTERED["phi"],
    "gpt_neox": CENTERED["gpt_neox"],
    "nemotron": CENTERED["nemotron"],
    "gpt_neox-in-turn": ("gpt_neox", {"use_parallel_residual": False}),
}
CASES |= RELATIVES


def pack_rows(name: str, data: Any) -> Any:
    """Store the matrices that a quantizer of llama.cpp packs in 8 bits."""
    fits = data.ndim > 1 and data.shape[-1] % 32 == 0
    kept = ("ssm_conv1d", "ssm_a", "ssm_d", "ssm_norm", "ffn_gate_inp", "token_embd", "rope")
    return gguf.GGMLQuantizationType.Q8_0 if fits and not any(k in name for k in kept) else None


def make(case: str, make_model: Callable[..., Any]) -> Any:
    model_type, settings = CASES[case]
    sizes = SIZES
    if model_type in ("falcon", "phi", "gpt_neox", "nemotron"):
        sizes = {"hidden_size": 96}
    return make_model(model_type, **sizes | settings)


def write(
    folder: Path,
    model: Any,
    packed: Any = None,
    architecture: str = "",
    extra: dict[str, Tensor] | None = None,
    fuse: bool = False,
    **changes: Any,
) -> Path:
    model.save_pretrained(folder / "original", save_original_format=False)
    tensors = gguf_tensors(load_file(folder / "original/model.safetensors"), model.config)
    for name in [name for name in tensors if ".attn_q." in name and fuse]:
        parts = [tensors.pop(name.replace("attn_q", f"attn_{part}")) for part in "qkv"]
        tensors[name.replace("attn_q", "attn_qkv")] = torch.cat(parts)
    if model.config.tie_word_embeddings:
        tensors.pop("output.weight", None)
    return write_gguf_file(
        folder / "model.gguf",
        architecture or architecture_of(model.config),
        {k: v for k, v in (gguf_settings(model.config) | changes).items() if v is not None},
        tensors | (extra or {}),
        packed or (lambda name, data: None),
    )


def logits_of(path: Path, token_ids: list[int]) -> Tensor:
    decoder = load_decoder(open_model(path), REFERENCE, torch.device("cpu"), torch.float32)
    return logits_in_steps(decoder, token_ids, [45])


@pytest.mark.parametrize("case", CASES)
def test_a_gguf_file_answers_as_the_checkpoint_it_was_made_from(
    case: str, make_model: Callable[..., Any], tmp_path: Path, token_ids: list[int]
) -> None:
    model = make(case, make_model)
    path = write(tmp_path, model)
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    assert expected.std() > 0.5
    torch.testing.assert_close(logits_of(path, token_ids), expected, atol=1e-4, rtol=0)


IMAGES: dict[str, Any] = {"rope.dimension_sections": [2, 3, 3, 0], "n_deepstack_layers": 3}
MINICPM = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 1.4 / 3**0.5,
    "logits_scaling": 64 / 256,
    "attention_multiplier": 16**-0.5,
}
# Labels of files with the tensors of another architecture: its type in transformers, its settings,
# and the file's different values; None: the file lacks the key.
LABELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2vl": ("qwen2", {}, IMAGES),
    "qwen3vl": ("qwen3", {}, IMAGES),
    "qwen3vlmoe": ("qwen3_moe", EXPERTS["qwen3_moe"][1] | {"mlp_only_layers": []}, IMAGES),
    "internlm2": ("llama", {}, {}),  # its converter splits the fused matrices
    "minicpm": ("granite", MINICPM, {"attention.scale": None}),
    "qwen": ("qwen2", {"num_key_value_heads": 4}, {"feed_forward_length": 152}),
    "chatglm": ("glm", {"attention_bias": True}, {}),
    "bailingmoe2": (
        "glm4_moe",
        EXPERTS["glm4_moe"][1] | {"use_qk_norm": True, "attention_bias": False},
        {"expert_gating_func": 2},
    ),
    "baichuan": ("llama", {"num_key_value_heads": 4}, {}),
    "bailingmoe": (
        "mixtral",
        EXPERTS["mixtral"][1],
        {"expert_feed_forward_length": 76, "expert_weights_norm": True},
    ),
    # Older files lack settings that all models shared.
    "minicpm old": (
        "granite",
        MINICPM,
        dict.fromkeys(("attention.scale", "embedding_scale", "residual_scale", "logit_scale")),
    ),
}


@pytest.mark.parametrize("label", LABELS)
def test_another_label_changes_no_answer(
    label: str,
    make_model: Callable[..., Any],
    tmp_path: Path,
    token_ids: list[int],
) -> None:
    model_type, settings, changes = LABELS[label]
    model = make_model(model_type, **SIZES | settings)
    fuse = label in ("qwen", "chatglm", "bailingmoe2")
    path = write(tmp_path, model, architecture=label.split()[0], fuse=fuse, **changes)
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    torch.testing.assert_close(logits_of(path, token_ids), expected, atol=1e-4, rtol=0)


def test_a_hybrid_with_a_block_that_predicts_further_tokens(
    make_model: Callable[..., Any], tmp_path: Path
) -> None:
    model = make("nemotron_h", make_model)
    plain = open_model(write(tmp_path, model)).spec
    settings, count = gguf_settings(model.config), len(plain.layers)
    changes: dict[str, Any] = {"block_count": count + 1, "nextn_predict_layers": 1}
    assert open_model(write(tmp_path, model, **changes)).spec == plain
    for key in ("attention.head_count_kv", "feed_forward_length"):
        changes[key] = [*settings[key], settings[key][-1]]
    assert open_model(write(tmp_path, model, **changes)).spec == plain


BIASED = [
    "granite", "granite4", "ministral3", "deepseek_v3", "gemma4-small", "falcon", "nemotron_h",
    # StarCoder 2 has all biases, and transformers names EXAONE 3's modules differently from
    # Llama's.
    "qwen3_next", *(case for case in RELATIVES if case not in ("starcoder2", "exaone")),
]  # fmt: skip


@pytest.mark.parametrize("case", BIASED)
def test_linears_of_every_family_may_have_biases(
    case: str, make_model: Callable[..., Any], tmp_path: Path, token_ids: list[int]
) -> None:
    """The biases are those of attention and MLP, which no family reorders."""
    model = make(case, make_model)
    plain = open_model(write(tmp_path, model))
    assert isinstance(plain.weights, GGUFWeights)
    there = GGUFFile(plain.path).tensor_names()
    biases: dict[str, Tensor] = {}
    for slot in plain.slots():
        fits = slot.role in (Role.OUTPUT, Role.DOWN) and slot.expert is None
        module = slot.name.removesuffix(".weight")
        of_mixer = slot.layer in plain.spec.recurrent_layers and slot.role is Role.OUTPUT
        if not fits or module == slot.name or of_mixer or "shared" in module:
            continue
        bias = torch.randn(slot.shape[0], generator=torch.Generator().manual_seed(len(biases)))
        name = plain.weights.usual_name(slot.name).removesuffix("weight") + "bias"
        if name in there:
            continue
        biases[name] = bias
        model.get_submodule(module).register_forward_hook(
            lambda _module, _inputs, output, bias=bias: output + bias
        )
    assert biases
    path = write(tmp_path, model, extra=biases)
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    torch.testing.assert_close(logits_of(path, token_ids), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ["qwen3_next", "mistral4", "gemma4", "nemotron_h"])
def test_packed_tensors_of_any_layout_keep_their_codes(
    case: str, make_model: Callable[..., Any], tmp_path: Path, token_ids: list[int]
) -> None:
    """Merged experts, latent heads and rows by kind are what dequantizing first would give."""
    path = write(tmp_path, make(case, make_model), pack_rows)
    source = open_model(path)
    packed = {s.role for s in source.slots() if source.weights.packed_bits(s.name) == 8}
    assert packed >= {Role.UP, Role.OUTPUT}
    rounded = gguf.GGUFReader(path)
    tensors = {
        tensor.name: torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in rounded.tensors
    }
    settings = gguf_settings(make(case, make_model).config)
    plain = write_gguf_file(tmp_path / "plain.gguf", rounded_name(rounded), settings, tensors)
    found, expected = logits_of(path, token_ids), logits_of(plain, token_ids)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def rounded_name(reader: Any) -> str:
    return str(reader.fields["general.architecture"].contents())


@pytest.mark.parametrize(
    ("case", "change", "error", "said"),
    [
        ("granite4", {"ssm.state_size": 48}, CheckpointError, "ssm_|in_proj.weight has shape"),
        ("nemotron_h", {"feed_forward_length": 24}, UnsupportedModelError, "feed_forward_length"),
        (
            "nemotron_h",
            {"moe_latent_size": 16},
            CheckpointError,
            "ffn_latent_down.weight is missing",
        ),
        ("gemma4", {"attention.sliding_window_pattern": [True]}, UnsupportedModelError, "window_p"),
        ("deepseek_v3", {"attention.kv_lora_rank": 44}, CheckpointError, "has shape"),
        ("deepseek_v3", {"expert_count": 12}, CheckpointError, r"model.gguf.*has shape"),
        ("falcon", {"attention.layer_norm_epsilon": 0.0}, CheckpointError, "norm_epsilon is 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(
    case: str,
    change: dict[str, Any],
    error: type[Exception],
    said: str,
    make_model: Callable[..., Any],
    tmp_path: Path,
) -> None:
    path = write(tmp_path, make(case, make_model), None, **change)
    with pytest.raises(error, match=said):
        open_model(path)


@pytest.mark.parametrize(
    ("architecture", "why"),
    [
        ("mamba", "no layer has attention; serve the folder .* MambaForCausalLM runs$"),
        ("rwkv7", "no layer has attention; serve this file with llama.cpp$"),
        ("bert", "only reads texts"),
        ("unheard-of", "'unheard-of' is not supported: .*; choose a file among llama, .*, gemma3n"),
    ],
)
def test_an_architecture_that_no_family_reads_is_refused_with_the_reason(
    architecture: str, why: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=why):
        family_of_gguf({"general.architecture": architecture})


def test_every_label_of_a_converter_is_read_or_refused_with_a_reason() -> None:
    read = {family.gguf.architecture for family in FAMILIES if family.gguf} | GGUF_CLASSES.keys()
    known = read | UNREAD_GGUF.keys() | NO_MODELS.keys()
    assert not set(gguf.MODEL_ARCH_NAMES.values()) - known
    assert not read & UNREAD_GGUF.keys()
    for label, reason in UNREAD_GGUF.items():
        assert len(reason.split("; ")) == 2, "a reason, and what to do"
        said = f"{label!r} is not supported: {reason}"
        with pytest.raises(UnsupportedModelError, match=re.escape(said) + "$"):
            family_of_gguf({"general.architecture": label})


def test_folders_that_are_advised_are_of_classes_that_are_served() -> None:
    from transformers.models.auto import modeling_auto

    kinds = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT")
    tables = (getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES") for kind in kinds)
    classes = {name for table in tables for name in table.values() if isinstance(name, str)}
    advised = [re.search(r"transformers' (\w+) runs$", why) for why in UNREAD_GGUF.values()]
    named = {found[1] for found in advised if found is not None}
    assert len(named) > 20
    assert not named - classes
    # No label is left to llama.cpp if a class has its name.
    kinds_of_text = {
        kind.replace("_", "-") for kind in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    }
    left = {label for label, why in UNREAD_GGUF.items() if why.endswith("with llama.cpp")}
    assert left & kinds_of_text == {"dbrx"}, "whose experts are not transformers' own kind"


@pytest.mark.parametrize(
    ("settings", "family"),
    [
        ({"expert_gating_func": 2, "block_count": 61}, "deepseek_v3"),
        ({"expert_gating_func": 1, "block_count": 60}, "deepseek_v2"),
        ({"block_count": 60, "vocab_size": 102400}, "deepseek_v2"),
        ({"block_count": 47, "vocab_size": 154880}, "deepseek_v3"),
        ({"block_count": 48, "vocab_size": 154880, "nextn_predict_layers": 1}, "deepseek_v3"),
        ({"block_count": 48, "vocab_size": 128256}, "deepseek_v2"),
    ],
)
def test_a_router_that_no_setting_names_is_known_by_the_size_of_its_model(
    settings: dict[str, int], family: str
) -> None:
    """`load_arch_hparams` in llama.cpp's deepseek2.cpp does so: GLM-4.7-Flash's files name none."""
    metadata = {f"deepseek2.{key}": value for key, value in settings.items()}
    assert family_of_gguf(metadata | {"general.architecture": "deepseek2"}).name == family
