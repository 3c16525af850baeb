"""Adapters that PEFT and llama.cpp write are read; all others are refused with the fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.gguf.gguf_models import gguf_factors, write_gguf_adapter
from support.models import family_settings
from support.models.centered_models import CENTERED
from support.models.lora import ALL, with_adapter, write_adapter
from support.models.recurrent_models import RECURRENT
from support.models.whole_models import TEXT, whole_model

from appliance.errors import AdapterError
from appliance.kernels.cpu.step_structs import AdapterPlace
from appliance.model.adapters.factors import Factors
from appliance.model.adapters.peft_settings import read_settings
from appliance.model.adapters.reader import read_adapter
from appliance.model.adapters.targets import adapter_bytes, adapter_targets, unserved_linears
from appliance.model.families.registry import FAMILIES
from appliance.model.source import open_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.model.source import ModelSource

# PEFT uses a property of transformers that is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
SIZES = {"head_dim": 16, "num_hidden_layers": 2}


@pytest.fixture
def source(make_model: Callable[..., Any], save: Callable[[Any], Path]) -> ModelSource:
    return open_model(save(make_model("llama", **SIZES)))


@pytest.fixture
def shapes(source: ModelSource) -> dict[str, tuple[int, int]]:
    targets = adapter_targets(source.spec, source.family.names)
    return {name: (one.slot.shape[0], one.slot.shape[1]) for name, one in targets.items()}


CASES: dict[str, dict[str, Any]] = {
    "list": {"target_modules": ["q_proj", "mlp.up_proj"]},
    "regex": {"target_modules": r".*\.0\.self_attn\.(q|v)_proj"},
    "all-linear": {"target_modules": "all-linear"},
    "rslora": {"use_rslora": True, "r": 9, "lora_alpha": 5},
    "patterns": {
        "rank_pattern": {"down_proj": 7, r"layers\.1\.self_attn\.q_proj": 2},
        "alpha_pattern": {"self_attn.o_proj": 11},
    },
    "layers": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "excluded": {"exclude_modules": ["k_proj", "model.layers.1.mlp.gate_proj"]},
}


@pytest.mark.parametrize("case", CASES)
def test_parts_are_those_of_peft(
    case: str, make_model: Callable[..., Any], source: ModelSource, tmp_path: Path
) -> None:
    """The change of each linear equals what PEFT adds to its weight."""
    adapted = with_adapter(make_model("llama", **SIZES), **CASES[case])
    adapted.save_pretrained(tmp_path / "adapter")
    adapter = read_adapter(tmp_path / "adapter", source, 16)
    expected = {
        name.removeprefix("base_model.model."): module.get_delta_weight("default")
        for name, module in adapted.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    assert adapter.parts.keys() == expected.keys()
    assert len(expected) >= 2
    for name, part in adapter.parts.items():
        torch.testing.assert_close(part.scale * part.b @ part.a, expected[name])
    assert adapter.notes == ()


@pytest.mark.parametrize("trained_on", ["whole", "text"])
@pytest.mark.parametrize("served_on", ["whole", "text"])
def test_an_adapter_fits_the_text_alone_and_the_whole_whichever_it_was_trained_on(
    trained_on: str, served_on: str, make_model: Callable[..., Any], tmp_path: Path
) -> None:
    text_alone = make_model("llama", **TEXT)
    models = {"whole": whole_model("llava", {}), "text": text_alone}
    models[served_on].save_pretrained(tmp_path / "base")
    base = open_model(tmp_path / "base")
    # Patterns, too, apply to the class with which the adapter was trained.
    before = "language_model.layers" if trained_on == "whole" else "model.layers"
    adapted = with_adapter(
        models[trained_on],
        target_modules=rf".*{before}\..*\.(q_proj|down_proj)",
        rank_pattern={rf"{before}\.1\.self_attn\.q_proj": 2},
    )
    adapted.save_pretrained(tmp_path / "adapter")
    adapter = read_adapter(tmp_path / "adapter", base, 16)
    expected = {
        name.partition("layers.")[2]: module.get_delta_weight("default")
        for name, module in adapted.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    assert len(expected) == len(adapter.parts) == 2 * TEXT["num_hidden_layers"]
    for name, part in adapter.parts.items():
        assert name.startswith(base.family.names.layer.partition("{}")[0])
        torch.testing.assert_close(
            part.scale * part.b @ part.a, expected[name.partition("layers.")[2]]
        )


def test_an_adapter_of_a_vision_tower_is_refused_by_the_name_of_its_linear(
    source: ModelSource, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "a", {"model.vision_tower.layers.0.mlp.fc1": (8, 8)})
    with pytest.raises(AdapterError, match=r"model\.vision_tower\.layers\.0\.mlp\.fc1"):
        read_adapter(adapter, source, 16)


Change = tuple[dict[str, Any], str]
FIELDS: list[Change] = [
    ({"use_dora": True}, "use_dora is True; DoRA"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
    ({"bias": "lora_only"}, "bias is 'lora_only'"),
    ({"lora_bias": True}, "lora_bias is True"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    ({"layer_replication": [[0, 2]]}, "layer_replication"),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"target_parameters": ["x"]}, "target_parameters"),
    ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
    ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    ({"invented_later": 1}, "invented_later is 1; no code here knows"),
    ({"r": 0}, "r is 0; it must be a number of at least 1"),
    ({"r": True}, "r is True"),
    ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
    ({"target_modules": None}, "target_modules is None"),
    ({"target_modules": "(q_proj"}, "no regular expression"),
    ({"rank_pattern": {"q_proj": "4"}}, "rank_pattern"),
    ({"rank_pattern": {"[": 4}}, "no regular expression"),
    ({"layers_to_transform": ["1"]}, "layers_to_transform"),
]


@pytest.mark.parametrize(("change", "words"), FIELDS, ids=lambda value: str(value)[:30])
def test_a_field_that_asks_for_more_is_refused_by_name(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    good = read_settings(tmp_path, json.dumps(config).encode())
    assert good.scale_of("model.layers.0.self_attn.q_proj") == 2.0
    with pytest.raises(AdapterError) as error:
        read_settings(tmp_path / "adapter_config.json", json.dumps(config | change).encode())
    assert words in str(error.value)


def renamed(old: str, new: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def removed(part: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if part in name]:
            del tensors[name]

    return change


def replaced(part: str, new: Callable[[Any], Any]) -> Callable[..., None]:
    def change(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name in tensors:
            if part in name:
                tensors[name] = new(tensors[name]).contiguous()

    return change


TENSORS: dict[str, tuple[Callable[..., None], str]] = {
    "embedding": (renamed("layers.0.self_attn.q_proj", "embed_tokens"), "embedding or the head"),
    "head": (renamed("model.layers.0.self_attn.q_proj", "lm_head"), "embedding or the head"),
    "experts": (renamed("mlp.up_proj", "mlp.experts.0.up_proj"), "changes experts"),
    "other model": (renamed("self_attn.q_proj", "attn.c_attn"), "which no adapter may change"),
    "more layers": (renamed("layers.1.self_attn.q_proj", "layers.9.self_attn.q_proj"), "another"),
    "dora": (renamed("q_proj.lora_A.weight", "q_proj.lora_magnitude_vector"), "use_dora"),
    "lora_bias": (renamed("q_proj.lora_B.weight", "q_proj.lora_B.bias"), "lora_bias"),
    "tokens": (renamed("q_proj.lora_A.weight", "q_proj.lora_embedding_A"), "embed_tokens"),
    "whole module": (renamed("q_proj.lora_A.weight", "q_proj.weight"), "modules_to_save"),
    "one factor": (removed("0.mlp.up_proj.lora_B"), "without the other"),
    "one module less": (removed("1.mlp.up_proj"), "has no factors of it"),
    "nothing": (removed("model"), "changes no linear"),
    "inputs": (replaced("1.mlp.down_proj.lora_A", lambda x: x[:, 1:]), "of another size"),
    "outputs": (replaced("1.mlp.down_proj.lora_B", lambda x: x[1:]), "of another size"),
    "ranks": (replaced("1.mlp.down_proj.lora_B", lambda x: x[:, 1:]), "have ranks 4 and 3"),
    "nan": (replaced("0.mlp.up_proj.lora_A", lambda x: x * torch.nan), "NaN"),
    "infinity": (replaced("0.mlp.up_proj.lora_B", lambda x: x / 0), "infinity"),
    "integers": (replaced("0.mlp.up_proj.lora_B", lambda x: x.int()), "factors are floats"),
    "vector": (replaced("0.mlp.up_proj.lora_B", lambda x: x[0]), "is a matrix"),
    "rank": (lambda config, tensors: config.update(r=5), "has rank 4, but r and rank_pattern"),
    "not named": (
        lambda config, tensors: config.update(exclude_modules=["up_proj"]),
        "do not belong together",
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_a_tensor_without_a_place_is_refused_by_name(
    case: str, source: ModelSource, shapes: dict[str, tuple[int, int]], tmp_path: Path
) -> None:
    change, words = TENSORS[case]
    folder = write_adapter(tmp_path / "adapter", shapes, change=change)
    with pytest.raises(AdapterError, match=words):
        read_adapter(folder, source, 16)


@pytest.mark.parametrize(
    ("model_type", "part", "modules"),
    [
        (
            "deepseek_v3",
            "latent attention",
            ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
        ),
        ("granitemoehybrid", "a Mamba-2 layer", ["in_proj", "out_proj"]),
        ("nemotron_h", "an MLP without a gate", ["up_proj", "down_proj"]),
    ],
)
def test_parts_that_run_no_adapters_are_refused_by_name(
    model_type: str, part: str, modules: list[str]
) -> None:
    family = next(one for one in FAMILIES if one.model_type == model_type)
    spec = family.spec(family_settings.SIZES | family_settings.OF_FAMILY[model_type][0], "a test")
    targets = adapter_targets(spec, family.names)
    unserved = unserved_linears(spec, family.names)
    assert targets
    assert not targets.keys() & unserved.keys()
    factors = Factors(Path("adapter"), targets, lambda: unserved)
    refused = [name for name, own in unserved.items() if own == part]
    assert {name.rpartition(".")[2] for name in refused} == set(modules)
    with pytest.raises(AdapterError, match=f"which belongs to {part}, where adapters are not"):
        factors.add("stored", refused[0], is_first=True, factor=torch.ones(2, 2))


def test_files_that_are_missing_or_damaged(
    source: ModelSource, shapes: dict[str, tuple[int, int]], tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "adapter", shapes)
    with pytest.raises(AdapterError, match="--max-lora-rank 4"):
        read_adapter(folder, source, 3)
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4])
    with pytest.raises(AdapterError, match="no usable safetensors"):
        read_adapter(folder, source, 16)
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"it has adapter_model\.bin: save it again"):
        read_adapter(folder, source, 16)
    for text in ("{", "[]"):
        config.write_text(text)
        with pytest.raises(AdapterError, match="no JSON"):
            read_adapter(folder, source, 16)
    config.unlink()
    with pytest.raises(AdapterError, match=r"has no adapter_config\.json"):
        read_adapter(folder, source, 16)
    with pytest.raises(AdapterError, match="is no adapter: give a folder"):
        read_adapter(tmp_path / "nothing", source, 16)


def test_notes_and_digests(
    source: ModelSource, shapes: dict[str, tuple[int, int]], tmp_path: Path
) -> None:
    def of_another(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        config["base_model_name_or_path"] = "org/Other-7B"

    other = read_adapter(write_adapter(tmp_path / "a", shapes, change=of_another), source, 16)
    assert "trained on 'org/Other-7B'" in other.notes[0]
    zeros = replaced("lora_B", torch.zeros_like)
    nothing = read_adapter(write_adapter(tmp_path / "b", shapes, change=zeros), source, 16)
    assert "changes nothing" in nothing.notes[0]
    same = [read_adapter(write_adapter(tmp_path / name, shapes), source, 16) for name in "cd"]
    assert same[0].digest == same[1].digest != nothing.digest
    assert (same[0].rank, same[0].modules) == (4, tuple(ALL))
    exact = adapter_bytes(source.spec, source.family.names, 4, lambda weight: 2)
    assert exact == 2 * same[0].num_parameters


def test_a_gguf_adapter_has_its_rows_in_order_again(
    source: ModelSource, shapes: dict[str, tuple[int, int]], tmp_path: Path
) -> None:
    """llama.cpp's converter permutes the rows of B of queries and keys."""
    folder = write_adapter(tmp_path / "adapter", shapes)
    expected = read_adapter(folder, source, 16)
    tensors = gguf_factors(source, expected.parts)
    path = write_gguf_adapter(tmp_path / "a.gguf", tensors, alpha=8.0)
    found = read_adapter(path, source, 16)
    assert found.parts.keys() == expected.parts.keys()
    for name, part in expected.parts.items():
        assert torch.equal(found.parts[name].a, part.a)
        assert torch.equal(found.parts[name].b, part.b)
        assert found.parts[name].scale == part.scale == 2.0
    without = read_adapter(write_gguf_adapter(tmp_path / "b.gguf", tensors), source, 16)
    assert {part.scale for part in without.parts.values()} == {1.0}
    assert without.digest != found.digest
    for fields, words in (
        ({"architecture": "gemma3"}, "general.architecture is 'gemma3'"),
        ({"type": "model"}, "general.type is 'model'"),
        ({"kind": "control_vector"}, "adapter.type"),
    ):
        with pytest.raises(AdapterError, match=words):
            read_adapter(write_gguf_adapter(tmp_path / "c.gguf", tensors, **fields), source, 16)
    whole = {"output.weight.lora_a": tensors["blk.0.attn_q.weight.lora_a"]}
    for extra, words in (
        (whole, "head"),
        ({"blk.0.attn_norm.weight": torch.ones(60)}, "no factor"),
    ):
        with pytest.raises(AdapterError, match=words):
            read_adapter(write_gguf_adapter(tmp_path / "d.gguf", tensors | extra), source, 16)


def test_a_gguf_adapter_has_rows_by_key_head_again(
    make_model: Callable[..., Any], save: Callable[[Any], Path], tmp_path: Path
) -> None:
    """llama.cpp stores queries, then keys, then values; Falcon's checkpoints by key head."""
    source = open_model(save(make_model("falcon", **CENTERED["falcon-new"][1])))
    targets = adapter_targets(source.spec, source.family.names)
    shapes = {name: (one.slot.shape[0], one.slot.shape[1]) for name, one in targets.items()}
    expected = read_adapter(write_adapter(tmp_path / "adapter", shapes), source, 16).parts
    heads = torch.arange(100).view(2, 5, 10)  # three queries, a key and a value
    by_kind = torch.cat([part.flatten() for part in heads.split([3, 1, 1], dim=1)])
    tensors = {}
    for (name, part), target in zip(expected.items(), targets.values(), strict=True):
        is_first = target.place is AdapterPlace.INTO_MIXER
        stored = f"blk.{target.layer}.{'attn_qkv' if is_first else 'attn_output'}.weight"
        tensors[f"{stored}.lora_a"] = part.a
        tensors[f"{stored}.lora_b"] = part.b[by_kind] if is_first else part.b
        assert name.endswith("query_key_value") == is_first
    path = write_gguf_adapter(tmp_path / "a.gguf", tensors, alpha=8.0, architecture="falcon")
    found = read_adapter(path, source, 16).parts
    assert all(torch.equal(found[name].b, part.b) for name, part in expected.items())


def test_a_gguf_adapter_of_linears_that_files_split_is_refused(
    make_model: Callable[..., Any], save: Callable[[Any], Path], tmp_path: Path
) -> None:
    source = open_model(save(make_model("qwen3_next", **RECURRENT["qwen3_next"][1])))
    tensors = {"blk.0.attn_qkv.weight.lora_a": torch.ones(4, 60)}
    path = write_gguf_adapter(tmp_path / "a.gguf", tensors, architecture="qwen3next")
    with pytest.raises(AdapterError, match=r"split linears .* use the folder that PEFT saved"):
        read_adapter(path, source, 16)
