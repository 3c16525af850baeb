"""Families with experts against transformers in float32, in both executors and every form."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.expert_models import EXPERTS
from support.models.native_models import native
from support.models.teacher_forcing import BLOCK_SIZE, logits_of

from appliance.errors import CheckpointError, ModelError
from appliance.kernels.backend import REFERENCE
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.rows.ragged import RaggedBatch
from appliance.model.loader import load_decoder
from appliance.model.native import why_unsupported
from appliance.model.source import open_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from appliance.kernels.cpu.structs import Isa

CPU_DEVICE = torch.device("cpu")
SIZES = {"head_dim": 16, "hidden_size": 64}


@pytest.fixture(scope="module", params=EXPERTS)
def model(request: pytest.FixtureRequest, make_model: Callable[..., Any]) -> Any:
    model_type, settings = EXPERTS[request.param]
    return make_model(model_type, **SIZES | settings)


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return folder


def by_transformers(model: Any, token_ids: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([token_ids])).logits[0]
    assert logits.std() > 0.5  # the logits vary
    return logits


@pytest.mark.parametrize("original", [True, False], ids=["each", "stacked"])
def test_torch_decoder_equals_transformers(
    model: Any, original: bool, tmp_path: Path, token_ids: list[int]
) -> None:
    if model.config.model_type in ("mixtral", "granitemoe", "ernie4_5_moe") and not original:
        pytest.skip("its checkpoints have one form")
    model.save_pretrained(tmp_path, save_original_format=original)
    decoder = load_decoder(open_model(tmp_path), REFERENCE, CPU_DEVICE, torch.float32)
    expected = by_transformers(model, token_ids)
    torch.testing.assert_close(logits_of(decoder, token_ids), expected, atol=1e-4, rtol=0)


def test_library_equals_transformers_and_no_bit_depends_on_the_cut(
    model: Any, isa: Isa, folder: Path, token_ids: list[int]
) -> None:
    assert why_unsupported(open_model(folder)) is None
    whole = logits_of(native(folder), token_ids)
    expected = by_transformers(model, token_ids)
    # For Step 3.7, whose logits have a spread of 3.1, transformers' float32 is 1.8e-4 off its own
    # float64.
    most = 1e-4 * max(1.0, float(expected.std()))
    torch.testing.assert_close(whole, expected, atol=most, rtol=0)
    shared_out = native(folder, threads=3)
    for chunks in ([7, 1, 9, 20, 1, 1, 6], [1] * 45):
        cut = logits_of(shared_out, token_ids, chunks=chunks, block_table=(5, 2, 7))
        assert torch.equal(cut, whole), chunks


def test_no_bit_depends_on_the_neighbours(folder: Path, token_ids: list[int]) -> None:
    decoder = native(folder, threads=2)
    sequences = [token_ids[i : i + 9 + 5 * i] for i in range(4)]
    cache = decoder.allocate_cache(KVFormat.FP32, num_blocks=4, block_size=BLOCK_SIZE)
    lengths = [len(tokens) for tokens in sequences]
    together = decoder.forward(
        torch.tensor([token for tokens in sequences for token in tokens]),
        torch.cat([torch.arange(length) for length in lengths]),
        RaggedBatch.of(
            lengths, lengths, [(i,) for i in range(4)], block_size=BLOCK_SIZE, device=CPU_DEVICE
        ),
        cache,
    )
    alone = torch.cat([logits_of(decoder, tokens) for tokens in sequences])
    assert torch.equal(together, alone)


def test_equal_experts_are_chosen_as_transformers_chooses(
    isa: Isa,
    make_model: Callable[..., Any],
    save: Callable[[Any], Path],
    token_ids: list[int],
) -> None:
    """Experts with equal scores differ, so it matters which of them are chosen."""
    sizes = {"num_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 24}
    model = make_model("qwen3_moe", **SIZES | sizes)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight[:] = layer.mlp.gate.weight[:2].repeat(6, 1)
    folder, expected = save(model), by_transformers(model, token_ids)
    exact = load_decoder(open_model(folder), REFERENCE, CPU_DEVICE, torch.float32)
    torch.testing.assert_close(logits_of(exact, token_ids), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(logits_of(native(folder), token_ids), expected, atol=1e-4, rtol=0)


OWN_CODE = {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but must be at most num_experts"),
        (
            {"num_experts": 9},
            r"mlp\.gate\.weight has shape \(8, 60\).*ask for \(9, 60\) with .*num_experts = 9 in",
        ),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"moe_intermediate_size": 48}, r"experts\.0\.gate_proj.weight has shape \(40, 60\)"),
        (
            {"mlp_only_layers": [7]},
            r"mlp_only_layers is \[7\], but must be a list of layers from 0 to 2, with",
        ),
        ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid' is not supported"),
        # It means nothing to the class, but the checkpoint comes with other code.
        (OWN_CODE | {"n_group": 4}, "n_group = 4 is not supported"),
        (OWN_CODE | {"n_shared_experts": 1}, "n_shared_experts = 1 is not supported"),
        (OWN_CODE | {"moe_expert_capacity": 4}, r"config\.json: moe_expert_capacity = 4 is not"),
        (OWN_CODE | {"router_bias_update": "top"}, "router_bias_update = 'top' is not supported"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_settings_that_do_not_fit_are_refused_by_name(
    settings: dict[str, Any], named: str, make_model: Callable[..., Any], tmp_path: Path
) -> None:
    model_type, usual = EXPERTS["qwen3_moe"]
    make_model(model_type, **usual).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("num_local_experts", None)
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_experts": 8} | settings))
    with pytest.raises(ModelError, match=named) as refused:
        open_model(tmp_path)
    assert "config.json" in str(refused.value)


def test_an_expert_that_a_shard_lacks_is_named(
    make_model: Callable[..., Any], tmp_path: Path
) -> None:
    model_type, usual = EXPERTS["qwen3_moe"]
    make_model(model_type, **usual).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.2.mlp.experts.5.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    named = r"2\.mlp\.experts\.5\.up_proj\.weight is missing.*8 experts .*num_(local_)?experts = 8"
    with pytest.raises(CheckpointError, match=f"{tmp_path.name}.*{named}"):
        open_model(tmp_path)


def test_a_stack_with_too_few_experts_is_refused(
    make_model: Callable[..., Any], tmp_path: Path
) -> None:
    model_type, usual = EXPERTS["qwen3_moe"]
    make_model(model_type, **usual).save_pretrained(tmp_path, save_original_format=False)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.2.mlp.experts.down_proj"
    tensors[name] = tensors[name][:7].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{name} has shape \(7, 60, 40\).*\(8, 60, 40\)"):
        open_model(tmp_path)
