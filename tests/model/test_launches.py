"""How many launches a layer takes on a GPU: each costs a graph's replay microseconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from support.kernels.kernel_gpu import gpu
from support.kernels.packed_weights import random_packed
from support.models.causal_models import random_model
from support.models.family_settings import OF_FAMILY, SIZES
from support.models.teacher_forcing import logits_of
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING

from appliance.fit import expected
from appliance.kernels.activation import Gating
from appliance.kernels.backend import triton_backend
from appliance.kernels.operations import Backend, Linear
from appliance.kernels.weights.weight import Weight
from appliance.model.attention import Attention, LatentAttention
from appliance.model.decoder import Decoder
from appliance.model.experts import Experts
from appliance.model.families.registry import FAMILIES
from appliance.model.loader import load_decoder
from appliance.model.source import open_model

MOST_WITH_EXPERTS = 13
# Sizes that the kernels have products for; the others are those of small models of each family.
WIDE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "moe_intermediate_size": 32,
    "q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
    "v_head_dim": 32, "shared_expert_intermediate_size": 64, "share_expert_dim": 32, "ffn_dim": 64,
    "ffn_hidden_size": 64, "block_ff_dim": 64, "shared_intermediate_size": 32,
    "intermediate_size_mlp": 32, "moe_shared_expert_intermediate_size": 32, "global_head_dim": 64,
    "word_embed_proj_dim": 64, "hidden_size_per_layer_input": 32, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "mamba_d_head": 32, "mamba_head_dim": 32, "rotary_dim": 16,
}  # fmt: skip
# Most launches of a layer with attention, where they are not 8: one more for an activation without
# a gate; one for gates of heads; two for parts of RoPE's families.
OF_DENSE_LAYER = {
    "arcee": 9,
    "falcon": 9,
    "gemma4_text": 12,
    "gpt_neox": 9,
    "lfm3": 9,
    "nemotron": 9,
    "opt": 9,
    "qwen3_5_text": 9,
    "starcoder2": 9,
    "cohere": 7,
    "cohere2": 7,
    "minicpm3": 11,
    "deepseek_v32": 11,
    "nemotron_h": 5,
}
PLAN = ("zeros", "plan_spans_kernel")  # once a step and window, not in each layer


class Computed(TorchDispatchMode):
    """Counts torch's operations that compute: neither views nor memory for results."""

    MEMORY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = counts

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, result = function.overloadpacket.__name__, function(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, list | tuple) else result
        is_view = not function._schema.is_mutable and shares_memory(first, args)
        if not is_view and name not in self.MEMORY:
            self._counts[name] += 1
        return result


def shares_memory(result: Any, args: Any) -> bool:
    """Whether an operation's result lies in the memory of its first argument."""
    first = args[0] if args else None
    if not (isinstance(result, torch.Tensor) and isinstance(first, torch.Tensor)):
        return False
    return result.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count launches, and launch none of our kernels."""
    counts: Counter[str] = Counter()

    def note(*, fn: Any, is_manual_warmup: bool, **_: object) -> bool:
        counts[fn.name.rpartition(".")[2]] += not is_manual_warmup
        return True

    runtime = triton.knobs.runtime
    with gpu(86, has_compiled=False), Computed(counts):
        before = runtime.jit_cache_hook
        runtime.jit_cache_hook = note
        runtime.launch_enter_hook.add(watch)  # so that Triton is asked for each launch
        try:
            yield counts
        finally:
            runtime.launch_enter_hook.remove(watch)
            runtime.jit_cache_hook = before


def watch(metadata: object) -> None:
    raise AssertionError(f"launched: {metadata}")


def with_packed_weights() -> Backend:
    """The kernels; whatever a layer's weight is, it is one of 4 bits of that shape."""
    ours = triton_backend()

    def packed(weight: Weight) -> Weight:
        rows, columns = weight.shape
        return random_packed(rows, columns, 32, symmetric=True)

    def prepare(weight: Weight, bias: torch.Tensor | None, dtype: torch.dtype) -> Linear:
        return ours.prepare_linear(packed(weight), bias, dtype)

    def prepare_gated(
        weight: Weight, bias: torch.Tensor | None, dtype: torch.dtype, activation: Gating
    ) -> Linear | None:
        return ours.prepare_gated(packed(weight), bias, dtype, activation)

    return replace(ours, prepare_linear=prepare, prepare_gated=prepare_gated)


def sizes_of(model_type: str, nth: int) -> dict[str, Any]:
    own: dict[str, Any] = {**SIZES, "pad_token_id": 0, **OF_FAMILY[model_type][nth]}
    sizes = own | {name: size for name, size in WIDE.items() if own.get(name)}
    if isinstance(own.get("moe_intermediate_size"), list):
        sizes["moe_intermediate_size"] = [32, 32]
    if model_type == "glm4_moe_lite":
        sizes["head_dim"] = 32  # another name of qk_rope_head_dim
    if model_type == "falcon":
        del sizes["head_dim"]
    return sizes


def decoder_of(model_type: str, sizes: dict[str, Any], folder: Path) -> Decoder:
    torch.manual_seed(0)
    random_model(model_type, **sizes).save_pretrained(folder)
    with gpu(86):
        return load_decoder(
            open_model(folder), with_packed_weights(), torch.device("cpu"), torch.bfloat16
        )


def launches_of_layers(decoder: Decoder) -> list[Counter[str]]:
    """Of each layer in a step with one row, behind 20 others; without the first's."""
    with counted() as counts:
        seen: list[Counter[str]] = []
        watched = replace(decoder, on_layer=lambda: seen.append(counts.copy()))
        logits_of(watched, list(range(21)), chunks=[20, 1])
    ends = seen[-len(decoder.layers) :]
    layers = [after - before for before, after in pairwise(ends)]
    for layer in layers:
        for name in PLAN:
            del layer[name]
    return layers


# Families that transformers has no class for have the arithmetic of others.
CASES = [
    (model_type, nth)
    for model_type in sorted({f.model_type for f in FAMILIES}.intersection(CONFIG_MAPPING.keys()))
    for nth in range(len(OF_FAMILY[model_type]))
    if (model_type, nth) != ("phi3", 0)  # whose factors are for heads of 16
]


@pytest.mark.parametrize(("model_type", "nth"), CASES)
def test_a_layer_takes_few_launches(model_type: str, nth: int, tmp_path: Path) -> None:
    decoder = decoder_of(model_type, sizes_of(model_type, nth), tmp_path)
    counted_layers = zip(decoder.layers[1:], launches_of_layers(decoder), strict=True)
    for layer, launches in counted_layers:
        if not isinstance(layer.mixer, Attention | LatentAttention):
            continue  # recurrent layers have operations of torch
        if isinstance(layer.mlp, Experts):
            assert launches.total() <= MOST_WITH_EXPERTS, launches
        else:
            assert launches.total() <= OF_DENSE_LAYER.get(model_type, 8), launches
        ours = {name for name in launches if name.endswith("_kernel")}
        assert ours == set(launches), f"operations of torch: {launches.keys() - ours}"


# Qwen3-30B-A3B and gpt-oss; a shared MLP, with a gate, of eight experts' width; latents.
@pytest.mark.parametrize(
    ("model_type", "settings", "most"),
    [
        ("qwen3_moe", {"num_experts": 128, "num_experts_per_tok": 8}, 10),
        ("gpt_oss", {"num_local_experts": 32, "num_experts_per_tok": 4}, 10),
        (
            "qwen2_moe",
            {
                "num_experts": 64,
                "num_experts_per_tok": 8,
                "shared_expert_intermediate_size": 256,
            },
            10,
        ),
        (
            "deepseek_v3",
            {"first_k_dense_replace": 0, "n_routed_experts": 256, "num_experts_per_tok": 8},
            13,
        ),
        ("llama4_text", {"num_local_experts": 16, "interleave_moe_layer_step": 1}, 11),
    ],
)
def test_routers_of_the_models_sizes(
    model_type: str, settings: dict[str, Any], most: int, tmp_path: Path
) -> None:
    decoder = decoder_of(model_type, sizes_of(model_type, 0) | settings, tmp_path)
    assert isinstance(decoder.layers[1].mlp, Experts)
    (launches,) = launches_of_layers(decoder)
    assert launches["choose_kernel"] == launches["add_experts_kernel"] == 1
    assert launches["grouped_matmul_kernel"] == 2
    assert launches.total() <= most, launches


LINEAR_BETWEEN = {
    "num_hidden_layers": 3,
    "layer_types": ["full_attention", "linear_attention", "full_attention"],
}
SAMPLING = 5  # kernels, which are no part of a decoder


# Kinds of layers whose launches `fit` counts, recurrent ones and shared MLPs among them.
@pytest.mark.parametrize(
    ("model_type", "nth", "settings"),
    [
        ("llama", 0, {}),
        ("qwen3", 0, {}),
        ("gemma3_text", 0, {}),
        ("gemma4_text", 1, {}),
        ("gpt_oss", 0, {}),
        ("qwen3_moe", 0, {"num_experts": 128, "num_experts_per_tok": 8}),
        ("qwen3_5_text", 0, LINEAR_BETWEEN),
        ("qwen3_5_moe_text", 0, LINEAR_BETWEEN),
        ("qwen3_next", 0, LINEAR_BETWEEN),
        ("lfm2", 0, {"num_hidden_layers": 3, "layer_types": ["full_attention", "conv", "conv"]}),
        ("nemotron_h", 0, {}),
        ("nemotron_h", 1, {}),
        ("deepseek_v3", 0, {}),
        ("arcee", 0, {}),
    ],
)
def test_fit_expects_as_many_launches_as_there_are(
    model_type: str, nth: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    decoder = decoder_of(model_type, sizes_of(model_type, nth) | settings, tmp_path)
    found = [launched.total() for launched in launches_of_layers(decoder)]
    assert found == [expected.layer_launches(layer) for layer in decoder.spec.layers[1:]]


def test_fit_expects_as_many_launches_beside_layers(tmp_path: Path) -> None:
    decoder = decoder_of("llama", sizes_of("llama", 0), tmp_path)
    with counted() as counts:
        ends: list[Counter[str]] = []
        watched = replace(decoder, on_layer=lambda: ends.append(counts.copy()))
        logits_of(watched, list(range(21)), chunks=[20, 1])
    head_of_prompt, of_the_test = 2, 1  # a product and a conversion; `cat` of both chunks' logits
    second = (counts - ends[len(decoder.layers) - 1]).total() - head_of_prompt - of_the_test
    assert second == expected.launches(decoder.spec) - SAMPLING
    of_layers = sum(map(expected.layer_launches, decoder.spec.layers))
    assert SAMPLING + second - of_layers == expected.STEP_KERNELS
