"""The mixes against those of llama.cpp, which it records for some models (tests/snapshots)."""

from __future__ import annotations

from dataclasses import replace

import gguf
import pytest
from support.gguf.ggml_models import write_llama

from appliance.errors import ConfigError
from appliance.model.source import open_model
from appliance.model.spec import AttentionSpec, DecoderSpec
from appliance.model.tensors import Role, TensorSlot
from appliance.quant.gguf.mixes import MIXES, mix_of

MORE = {0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27}  # of 28 layers, with Q6_K in Q4_K_M
MORE_OF_80 = {*range(10), *range(12, 70, 3), *range(70, 80)}
ALL_28, ALL_80 = set(range(28)), set(range(80))

# Per mix: roles, the type, and its layers; others have the base. Qwen3-0.6B has 28 layers of 16
# heads over 8, Llama-3.1-70B 80 of 64 over 8. The record has no importance matrix, without which
# IQ4 gives early DOWN five bits as well.
Expected = dict[tuple[str, ...], list[tuple[str, set[int]]]]
QWEN3: dict[str, Expected] = {
    "Q2_K": {("VALUE", "OUTPUT", "DOWN"): [("Q3_K", ALL_28)]},
    "Q2_K_S": {("DOWN",): [("Q4_K", {0, 1, 2})]},
    "Q3_K_S": {},
    "Q3_K_M": {
        ("VALUE",): [("Q5_K", {0, 1}), ("Q4_K", ALL_28 - {0, 1})],
        ("OUTPUT",): [("Q4_K", ALL_28)],
        ("DOWN",): [("Q5_K", {0}), ("Q4_K", ALL_28 - {0})],
    },
    "Q3_K_L": {("VALUE", "OUTPUT", "DOWN"): [("Q5_K", ALL_28)]},
    "Q4_K_S": {("VALUE",): [("Q5_K", {0, 1, 2, 3})], ("DOWN",): [("Q5_K", {0, 1, 2})]},
    "Q4_K_M": {("VALUE", "DOWN"): [("Q6_K", MORE)]},
    "Q5_K_S": {},
    "Q5_K_M": {("VALUE", "DOWN"): [("Q6_K", MORE)]},
    "Q6_K": {},
    "IQ4_NL": {},
    "IQ4_XS": {},
}
LLAMA_70B: dict[str, Expected] = {
    "Q2_K": {("VALUE",): [("Q5_K", ALL_80)], ("OUTPUT", "DOWN"): [("Q3_K", ALL_80)]},
    "Q2_K_S": {("VALUE",): [("Q5_K", ALL_80)], ("DOWN",): [("Q4_K", set(range(10)))]},
    "Q3_K_S": {("VALUE",): [("Q5_K", ALL_80)]},
    "Q4_K_M": {
        ("VALUE",): [("Q6_K", MORE_OF_80), ("Q5_K", ALL_80 - MORE_OF_80)],
        ("DOWN",): [("Q6_K", MORE_OF_80)],
    },
    "IQ4_XS": {("VALUE",): [("Q5_K", ALL_80)]},
}


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> DecoderSpec:
    path = write_llama(tmp_path_factory.mktemp("small") / "small.gguf", ["Q8_0"], tied=False)
    return open_model(path).spec


def of_size(spec: DecoderSpec, layers: int, heads: int, kv_heads: int) -> DecoderSpec:
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, AttentionSpec)
    layer = replace(spec.layers[0], mixer=replace(mixer, num_heads=heads, num_kv_heads=kv_heads))
    return replace(spec, layers=(layer,) * layers)


@pytest.mark.parametrize("name", QWEN3)
def test_a_small_model_gets_the_types_that_llama_cpp_records(spec: DecoderSpec, name: str) -> None:
    check(of_size(spec, 28, 16, 8), name, QWEN3[name])


@pytest.mark.parametrize("name", LLAMA_70B)
def test_a_model_of_70_billion_does(spec: DecoderSpec, name: str) -> None:
    check(of_size(spec, 80, 64, 8), name, LLAMA_70B[name])


def check(spec: DecoderSpec, name: str, expected: Expected) -> None:
    mix = MIXES[name]
    for role in (Role.QUERY, Role.KEY, Role.VALUE, Role.OUTPUT, Role.GATE, Role.UP, Role.DOWN):
        rules = [rule for roles, rules in expected.items() if role.name in roles for rule in rules]
        for layer in range(len(spec.layers)):
            slot = TensorSlot(f"{role.value}.weight", (256, 256), role, layer)
            wanted = next((kind for kind, layers in rules if layer in layers), mix.base)
            assert mix.scheme_of(slot, spec).type_name == wanted, (name, role, layer)


def test_each_has_the_number_that_files_state() -> None:
    for name, mix in MIXES.items():
        assert gguf.LlamaFileType(mix.number).name == f"MOSTLY_{name}"


@pytest.mark.parametrize(
    ("name", "found"), [("q4_k_m", "Q4_K_M"), ("Q5_K", "Q5_K_M"), (" iq4_xs", "IQ4_XS")]
)
def test_names_are_read_as_people_type_them(name: str, found: str) -> None:
    assert mix_of(name).name == found


def test_an_unknown_name_gets_the_list() -> None:
    with pytest.raises(ConfigError, match=r"'Q4_K_XL' is not known; use Q2_K, .*, Q4_K_M, .*Q8_0$"):
        mix_of("Q4_K_XL")
