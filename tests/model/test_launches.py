"""How many launches experts take on a GPU: each costs a graph's replay microseconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from support.kernels.kernel_gpu import gpu
from support.kernels.packed_weights import random_packed
from support.models.causal_models import random_model
from support.models.expert_models import EXPERTS
from support.models.model_families import SIZES
from support.models.teacher_forcing import logits_of
from torch.utils._python_dispatch import TorchDispatchMode

from appliance.kernels.activation import Gating
from appliance.kernels.backend import triton_backend
from appliance.kernels.operations import Backend, Linear
from appliance.kernels.weights.weight import Weight
from appliance.model.decoder import Decoder
from appliance.model.experts import Experts
from appliance.model.loader import load_decoder
from appliance.model.source import open_model

# Routers of the models' sizes; the most launches of the experts in a step with one row; and of the
# whole layer, where its attention is one kernel.
LAYERS: dict[str, tuple[str, dict[str, Any], int, int | None]] = {
    "qwen3_30b_a3b": (
        "qwen3_moe",
        {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
        6,
        12,
    ),
    "gpt_oss_20b": (
        "gpt_oss",
        EXPERTS["gpt_oss"][1] | {"num_local_experts": 32, "num_experts_per_tok": 4},
        6,
        12,
    ),
    # What experts read is weighed; an MLP is shared.
    "llama4_scout": (
        "llama4_text",
        EXPERTS["llama4"][1]
        | {"num_local_experts": 16, "interleave_moe_layer_step": 1, "intermediate_size": 32},
        9,
        None,
    ),
    # A shared MLP has a gate.
    "qwen2_57b_a14b": (
        "qwen2_moe",
        {
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "shared_expert_intermediate_size": 64,
        },
        8,
        14,
    ),
    "deepseek_v3": (
        "deepseek_v3",
        EXPERTS["deepseek_v3"][1]
        | {
            "first_k_dense_replace": 0,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 32,
            "v_head_dim": 32,
            "moe_intermediate_size": 32,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
        },
        8,
        None,
    ),
}


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


def decoder_of(model_type: str, settings: dict[str, Any], num_layers: int, folder: Path) -> Decoder:
    own = {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 32}
    sizes: dict[str, Any] = {**SIZES, **own, **settings, "num_hidden_layers": num_layers}
    torch.manual_seed(0)
    random_model(model_type, **sizes).save_pretrained(folder)
    with gpu(86):
        return load_decoder(
            open_model(folder), with_packed_weights(), torch.device("cpu"), torch.bfloat16
        )


def launches_of_decode(decoder: Decoder) -> Counter[str]:
    """Of a step with one row, behind 20 others."""
    found = []
    for chunks in ([20], [20, 1]):
        with counted() as counts:
            logits_of(decoder, list(range(sum(chunks))), chunks=chunks)
        found.append(counts)
    return found[1] - found[0]


@pytest.mark.parametrize("name", LAYERS)
def test_experts_take_few_launches(name: str, tmp_path: Path) -> None:
    model_type, settings, of_experts, of_layer = LAYERS[name]
    decoder = decoder_of(model_type, settings, 4, tmp_path / "four")
    experts = decoder.layers[2].mlp
    assert isinstance(experts, Experts)
    row = torch.randn(1, 64).bfloat16()
    with counted() as launches:
        experts(row, row)
    assert launches["route_kernel"] == launches["add_experts_kernel"] == 1
    assert launches.total() <= of_experts, launches
    if of_layer is not None:
        # Layers are alike, so one more is what differs.
        fewer = decoder_of(model_type, settings, 3, tmp_path / "three")
        layer = launches_of_decode(decoder) - launches_of_decode(fewer)
        assert layer["route_kernel"] == 1
        assert layer.total() <= of_layer, layer
