"""Keys of a GGUF file with values that change nothing, and keys that llama.cpp honours.

The keys of a complete file are those of llama.cpp's model saver (src/llama-model-saver.cpp), with
its defaults (src/llama-hparams.h) for everything that a Llama does not use. Logits are
transformers'.
"""

from __future__ import annotations

import math
import os
import random
import struct
from typing import TYPE_CHECKING, Any

import pytest
import torch
from gguf import GGUFValueType as T
from support.gguf.gguf_files import with_metadata
from support.gguf.gguf_models import gguf_tensors, llama3_divisors, write_gguf
from support.models.changed_settings import Oracle
from support.models.random_changes import random_changes
from support.models.teacher_forcing import logits_of
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from appliance.errors import ApplianceError, CheckpointError, ModelError, UnsupportedModelError
from appliance.gguf import read_header
from appliance.kernels.backend import REFERENCE
from appliance.model.loader import load_decoder
from appliance.model.source import open_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LAYERS = 3  # of the small models
SAVED: dict[str, Any] = {
    "vocab_size": 97,
    "leading_dense_block_count": 0,
    "expert_feed_forward_length": 0,
    "expert_latent_length": 0,
    "expert_shared_feed_forward_length": 0,
    "expert_chunk_feed_forward_length": 0,
    "swiglu_clamp_exp": [0.0] * LAYERS,
    "swiglu_clamp_shexp": [0.0] * LAYERS,
    "use_parallel_residual": False,
    "expert_count": 0,
    "expert_used_count": 0,
    "expert_shared_count": 0,
    "expert_group_count": 0,
    "expert_group_used_count": 0,
    "expert_weights_scale": 0.0,
    "expert_weights_norm": False,
    "expert_gating_func": 0,
    "expert_group_scale": 0.05,
    "experts_per_group": 0,
    "moe_every_n_layers": 0,
    "nextn_predict_layers": 0,
    "n_deepstack_layers": 0,
    "deepstack_mapping": [-1] * LAYERS,
    "pooling_type": 0,
    "logit_scale": 0.0,
    "decoder_start_token_id": (-1, T.INT32),
    "decoder_block_count": 0,
    "attn_logit_softcapping": 50.0,
    "router_logit_softcapping": 30.0,
    "final_logit_softcapping": 30.0,
    "swin_norm": False,
    "rescale_every_n_layers": 0,
    "time_mix_extra_dim": 0,
    "time_decay_extra_dim": 0,
    "residual_scale": 0.0,
    "embedding_scale": 0.0,
    "token_shift_count": 2,
    "interleave_moe_layer_step": 0,
    "attention.max_alibi_bias": 0.0,
    "attention.clamp_kqv": 0.0,
    "attention.layer_norm_epsilon": 0.0,
    "attention.group_norm_epsilon": 0.0,
    "attention.group_norm_groups": 0,
    "attention.causal": True,
    "attention.q_lora_rank": 0,
    "attention.kv_lora_rank": 0,
    "attention.decay_lora_rank": 0,
    "attention.iclr_lora_rank": 0,
    "attention.value_residual_mix_lora_rank": 0,
    "attention.gate_lora_rank": 0,
    "attention.relative_buckets_count": 0,
    "attention.rope_pattern": 1,
    "attention.sliding_window": 0,
    "attention.scale": 0.0,
    "attention.output_scale": 0.0,
    "attention.value_scale": 0.0,
    "attention.temperature_length": 0,
    "attention.temperature_scale": 0.0,
    "attention.key_length_mla": 0,
    "attention.value_length_mla": 0,
    "attention.key_length_swa": 10,
    "attention.value_length_swa": 10,
    "attention.indexer.head_count": 0,
    "attention.indexer.key_length": 0,
    "attention.indexer.top_k": 0,
    "attention.indexer.block_size": 0,
    "attention.indexer.local_blocks": 0,
    "attention.indexer.types": 0,
    "attention.recurrent_layers": 0,
    "attention.output_group_count": 0,
    "attention.output_lora_rank": 0,
    "attention.compress_rope_freq_base": 0.0,
    "attention.compress_ratios": 0,
    "hyper_connection.count": 0,
    "hyper_connection.sinkhorn_iterations": 0,
    "hyper_connection.epsilon": 0.0,
    "hash_layer_count": 0,
    "rope.dimension_count_swa": 10,
    "rope.dimension_sections": [0, 0, 0, 0],
    "rope.freq_base": 10000.0,
    "rope.freq_base_swa": 10000.0,
    "rope.scaling.type": "linear",
    "rope.scaling.factor": 0.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.original_context_length": 128,
    "rope.scaling.finetuned": False,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scaling.yarn_ext_factor": -1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
    "ssm.inner_size": 0,
    "ssm.conv_kernel": 0,
    "ssm.state_size": 0,
    "ssm.time_step_rank": 0,
    "ssm.group_count": 0,
    "ssm.dt_b_c_rms": False,
    "kda.head_dim": 0,
    "kda.safe_gate": False,
    "kda.gate_lower_bound": -math.inf,
    "wkv.head_size": 0,
}
# Numbers in unusual types and forms, and other values without effect.
FORMS: dict[str, dict[str, Any]] = {
    "saved": SAVED,
    "lists": {
        "attention.head_count": [6] * LAYERS,
        "attention.head_count_kv": [2] * LAYERS,
        "feed_forward_length": [76] * LAYERS,
    },
    "types": {
        "attention.head_count": (6, T.INT32),
        "attention.head_count_kv": (2, T.UINT64),
        "feed_forward_length": (76, T.UINT16),
        "embedding_length": (60, T.INT64),
        "attention.layer_norm_rms_epsilon": (1e-6, T.FLOAT64),
        "rope.freq_base": (10000, T.UINT32),
        "attention.causal": (1, T.UINT8),
        "use_parallel_residual": (0, T.UINT8),
    },
    "neutral": {
        "rope.scale_linear": 1.0,
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1.0,
        "rope.scaling.yarn_ext_factor": 0.0,
        "logit_scale": 1.0,
        "expert_weights_scale": 1.0,
        "expert_gating_func": 1,
        "pooling_type": 3,
        "classifier.output_labels": ["no", "yes"],
        "shortconv.l_cache": 0,
    },
}


def expect_as(path: Path, model: Any, token_ids: list[int]) -> None:
    decoder = load_decoder(open_model(path), REFERENCE, torch.device("cpu"), torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids])).logits[0]
    torch.testing.assert_close(logits_of(decoder, token_ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("form", FORMS)
def test_settings_that_say_nothing_change_nothing(
    form: str, make_model: Callable[..., Any], tmp_path: Path, token_ids: list[int]
) -> None:
    model = make_model("llama")
    path = write_gguf(tmp_path / "m.gguf", model, "llama", FORMS[form])
    expect_as(path, model, token_ids)


YARN = {"rope_theta": 50.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} | YARN
HEAD = {"attention.key_length": 12, "attention.value_length": 12}
BASE = {"rope.freq_base": 50.0}
# transformers' rope_parameters, and the equivalent keys of a file
HONOURED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the older name of a linear factor": (
        {"rope_type": "linear", "rope_theta": 50.0, "factor": 4.0},
        {"rope.scale_linear": 4.0},
    ),
    "a factor without a type is linear": (
        {"rope_type": "linear", "rope_theta": 50.0, "factor": 4.0},
        {"rope.scaling.factor": 4.0},
    ),
    "a factor is not used where the type is none": (
        {"rope_type": "default", "rope_theta": 50.0},
        {"rope.scaling.factor": 4.0, "rope.scaling.type": "none"},
    ),
    "YaRN's factor of cosines": (
        YARN | {"rope_type": "yarn", "attention_factor": 1.5 * (0.1 * math.log(4.0) + 1.0)},
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.attn_factor": 1.5,
            "rope.scaling.yarn_ext_factor": 1.0,
        },
    ),
    "divisors of frequencies": (LLAMA3 | {"rope_type": "llama3"}, {}),
}


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("case", HONOURED)
def test_rotary_settings_are_honoured(
    case: str,
    architecture: str,
    make_model: Callable[..., Any],
    tmp_path: Path,
    token_ids: list[int],
) -> None:
    rope, metadata = HONOURED[case]
    model = make_model(architecture, rope_parameters=rope, head_dim=12)
    tensors = gguf_tensors(model, architecture)
    assert ("rope_freqs.weight" in tensors) == (case == "divisors of frequencies")
    settings = BASE | HEAD | metadata
    path = write_gguf(tmp_path / "m.gguf", model, architecture, settings, tensors=tensors)
    expect_as(path, model, token_ids)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.sliding_window", 64),
        ("attention.clamp_kqv", 8.0),
        ("attention.max_alibi_bias", 8.0),
        ("attention.causal", False),
        ("attention.temperature_scale", 0.1),
        ("attention.head_count", [6, 3, 6]),
        ("attention.rope_pattern", [1, 1, 0]),
        ("attn_logit_softcapping", 20.0),
        ("final_logit_softcapping", 20.0),
        ("expert_group_count", 4),
        ("expert_gating_func", 2),
        ("logit_scale", 0.5),
        ("rope.scaling.attn_factor", 1.5),
        ("rope.scaling.type", "dynamic"),
        ("rope.scaling.yarn_ext_factor", 0.5),
        ("rope.scaling.yarn_attn_factor", 0.5),
        ("rope.scaling.alpha", 100.0),
        ("nextn_predict_layers", 3),
        ("swiglu_clamp_exp", [0.0, 7.0, 0.0]),
        ("ssm.state_size", 16),
        ("a_key_of_tomorrow", 1),
    ],
)
def test_settings_that_are_not_honoured_are_refused_by_name(
    key: str, value: Any, make_model: Callable[..., Any], tmp_path: Path
) -> None:
    settings = {key: value}
    if key == "rope.scaling.type":
        settings["rope.scaling.factor"] = 4.0
    path = write_gguf(tmp_path / "m.gguf", make_model("llama"), "llama", settings)
    with pytest.raises(UnsupportedModelError, match=key) as raised:
        open_model(path)
    assert "again" not in str(raised.value)


def test_a_wrong_setting_is_not_blamed_on_the_download(
    make_model: Callable[..., Any], tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_model("llama"), "llama", {"context_length": 0})
    with pytest.raises(CheckpointError, match=r"context_length is 0.*use another file"):
        open_model(path)


@pytest.mark.parametrize("token_id", [2**32 - 1, 97])
def test_an_id_of_no_token_is_no_id(
    token_id: int, make_model: Callable[..., Any], tmp_path: Path
) -> None:
    """The id is -1 in 32 bits, or past the vocabulary: llama.cpp warns and takes its default."""
    ids = {"tokenizer.ggml.bos_token_id": token_id}
    path = write_gguf(tmp_path / "m.gguf", make_model("llama"), "llama", {}, ids=ids)
    config = open_model(path).config
    assert "bos_token_id" not in config
    assert config["eos_token_id"] == 2


def test_divisors_beside_another_scaling_are_refused(
    make_model: Callable[..., Any], tmp_path: Path
) -> None:
    model = make_model("llama")
    tensors = gguf_tensors(model, "llama")
    tensors["rope_freqs.weight"] = llama3_divisors(LLAMA3, 10)
    settings = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    path = write_gguf(tmp_path / "m.gguf", model, "llama", settings, tensors=tensors)
    with pytest.raises(ModelError, match=r"rope.scaling.type.*none beside rope_freqs"):
        open_model(path)


def test_blocks_that_predict_further_tokens_are_left_out(
    make_model: Callable[..., Any], tmp_path: Path, token_ids: list[int]
) -> None:
    """Lists of layers may have either length: llama.cpp's saver leaves those blocks out."""
    model = make_model("qwen3", head_dim=12)
    tensors = gguf_tensors(model, "qwen3")
    further = {
        name.replace("blk.2.", "blk.3."): tensor
        for name, tensor in tensors.items()
        if name.startswith("blk.2.")
    }
    further["blk.3.nextn.eh_proj.weight"] = torch.ones(60, 120)
    for layers in (LAYERS, LAYERS + 1):
        settings = HEAD | {
            "block_count": 4,
            "nextn_predict_layers": 1,
            "attention.head_count_kv": [2] * layers,
        }
        path = tmp_path / f"{layers}.gguf"
        write_gguf(path, model, "qwen3", settings, tensors=tensors | further)
        expect_as(path, model, token_ids)


CHANGES = int(os.environ.pop("APPLIANCE_TEST_CHANGES", "40"))
SEED = os.environ.pop("APPLIANCE_TEST_CHANGES_SEED", "1")
MORE = {
    "attention.key_length", "attention.sliding_window", "attention.scale", "logit_scale",
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "expert_count", "expert_used_count", "final_logit_softcapping", "vocab_size",
    "nextn_predict_layers", "a_key_of_tomorrow",
}  # fmt: skip
# A changed size is refused by a tensor of another shape, or by another key that depends on it.
ALSO = ("tensor ", "as the keys have", "rope_type")


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_key_changed_at_random_is_refused_by_name_or_means_what_it_means_to_transformers(
    architecture: str, make_model: Callable[..., Any], tmp_path: Path, token_ids: list[int]
) -> None:
    """For keys that transformers' reader ignores, the config that we read goes to transformers."""
    model = make_model(architecture, head_dim=12)
    base = write_gguf(tmp_path / "base.gguf", model, architecture, HEAD | {"vocab_size": 97})
    known = {key for key, own in GGUF_CONFIG_MAPPING[architecture].items() if own is not None}
    oracle, usual = Oracle(model, token_ids), model.config.to_dict()
    del usual["rope_parameters"]
    metadata, path = read_header(base).metadata, tmp_path / "changed.gguf"
    more = {f"{architecture}.{key}" for key in MORE}
    found, served = [], 0
    given = random.Random(f"{SEED} {architecture}")
    for change in random_changes(metadata, more, given, CHANGES):
        stored = [(key, value) for key, value in change.config.items() if value is not None]
        try:
            with_metadata(base, path, stored)
        except (TypeError, struct.error, OverflowError):
            continue  # no file can store it
        names = [key.removeprefix(f"{architecture}.") for key in (change.key, *change.also)]
        try:
            source = open_model(path)
            ours = logits_of(
                load_decoder(source, REFERENCE, torch.device("cpu"), torch.float32), token_ids
            )
        except ApplianceError as error:
            named = any(name.removeprefix("general.") in str(error) for name in [*names, *ALSO])
            found.append("" if named else f"{change}: refused without its name: {error}")
            continue
        except Exception as error:
            found.append(f"{change}: {type(error).__name__}: {error}")
            continue
        served += 1
        theirs = None
        if known.issuperset(names):
            read = load_gguf_checkpoint(str(path))["config"] | {"vocab_size": 97}
            theirs = oracle.logits(usual | read)
        if theirs is None:  # perhaps because of a number's type
            theirs = oracle.logits(usual | source.config)
        is_same = theirs is not None and torch.allclose(ours, theirs, atol=3e-4, rtol=1e-4)
        found.append("" if is_same else f"{change}: other logits")
    assert "\n".join(fault for fault in found if fault) == ""
    assert served


ENDLESS = struct.pack("<IIQ", T.ARRAY, T.UINT32, 2**32 - 1)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (("llama.a_list", ENDLESS), "announces 4294967295 values in an array"),
        (("llama.block_count", 2), "'llama.block_count' occurs twice"),
    ],
)
def test_an_array_without_end_and_a_key_given_twice_are_refused(
    entry: tuple[str, Any], said: str, make_model: Callable[..., Any], tmp_path: Path
) -> None:
    base = write_gguf(tmp_path / "base.gguf", make_model("llama"), "llama", {})
    stored = [*read_header(base).metadata.items(), entry]
    with pytest.raises(CheckpointError, match=said):
        open_model(with_metadata(base, tmp_path / "changed.gguf", stored))
