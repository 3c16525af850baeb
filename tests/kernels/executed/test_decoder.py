from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.gguf.ggml_models import write_llama
from support.kernels.packed_weights import random_packed
from support.models import model_families
from support.models.causal_models import random_model
from support.models.expert_models import save_experts
from support.models.recurrent_models import RECURRENT, SIZES, logits_in_steps
from support.models.teacher_forcing import logits_of

from appliance.gguf import read_header
from appliance.gguf.header import TensorInfo
from appliance.gguf.types import SUPERBLOCK, UNPACKED_TYPES
from appliance.kernels.activation import Activation
from appliance.kernels.backend import REFERENCE, select_backend
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.int8_matmul import launch as int8_matmul
from appliance.kernels.int8_matmul.reference import RoundingLinear
from appliance.kernels.int8_matmul.tiles import LEAST_ROWS
from appliance.kernels.operations import ChosenExperts
from appliance.kernels.packed_matmul.reference import DenseLinear
from appliance.kernels.routing import Router
from appliance.kernels.rows.ragged import RaggedBatch
from appliance.kernels.weights.fp8 import Fp8Weight
from appliance.kernels.weights.ggml_types import GGML_TYPES
from appliance.kernels.weights.weight import Weight
from appliance.model.experts import group_experts, stack_experts
from appliance.model.layer_builder import LayerBuilder
from appliance.model.layer_weights import MLPWeights
from appliance.model.layers import GatedLinear
from appliance.model.linear import LinearPart
from appliance.model.loader import load_decoder
from appliance.model.prompt_layers import PromptLayers, with_linears
from appliance.model.source import open_model
from appliance.model.spec import DecoderSpec, ExpertsSpec, MLPSpec, NormSpec

NO_LAYERS = DecoderSpec("none", 64, 97, 32, (), NormSpec(1e-5), tied_head=True)
TOKEN_IDS = torch.randint(3, 500, (40,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("kv_format", [KVFormat.FP32, KVFormat.INT8])
def test_a_model_on_the_kernels_says_what_it_says_on_the_reference(
    tiny_llama: Path, kv_format: KVFormat
) -> None:
    found, expected = (
        logits_of(
            load_decoder(open_model(tiny_llama), backend, torch.device("cpu"), torch.float32),
            TOKEN_IDS,
            chunks=[17, 1, 21, 1],
            format=kv_format,
        )
        for backend in (select_backend(torch.device("cuda")), REFERENCE)
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


# Queries straight, and by latents. The kernels are compiled in test_latent_attention.
@pytest.mark.interpreted
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_latents_of_8_bits_say_what_they_say_on_the_reference(family: str, tmp_path: Path) -> None:
    save_experts(family, tmp_path)
    found, expected, exact = (
        logits_of(
            load_decoder(open_model(tmp_path), backend, torch.device("cpu"), torch.float32),
            [token % 50 for token in TOKEN_IDS[:24]],
            chunks=[17, 1, 5, 1],
            format=kv_format,
        )
        for backend, kv_format in (
            (select_backend(torch.device("cuda")), KVFormat.INT8),
            (REFERENCE, KVFormat.INT8),
            (REFERENCE, KVFormat.FP32),
        )
    )
    # Sums in another order turn few codes to the next.
    error, rounding = (found - expected).abs(), (expected - exact).abs()
    assert rounding.mean() > 1e-4
    assert error.mean() < 0.02 * rounding.mean()


# Every type's kernel is compiled and executed in test_ggml_matmul.
@pytest.mark.interpreted
def test_a_gguf_file_takes_as_much_memory_as_on_disk_with_a_tied_head_once(
    tmp_path: Path,
) -> None:
    source = open_model(write_llama(tmp_path / "model.gguf", tuple(GGML_TYPES), layers=2))
    cpu = torch.device("cpu")
    found = load_decoder(source, select_backend(torch.device("cuda")), cpu, torch.bfloat16)
    exact = load_decoder(source, REFERENCE, cpu, torch.float32)
    held = sum(map(held_as, read_header(source.path).tensors.values()))
    assert found.weight_bytes == pytest.approx(held, rel=0.03)
    token_ids = [token % 100 for token in TOKEN_IDS[:18]]
    said, expected = (logits_of(one, token_ids).log_softmax(-1) for one in (found, exact))
    assert expected.std() > 0.5
    assert (expected.exp() * (expected - said)).sum(-1).mean() < 0.002


def held_as(info: TensorInfo) -> int:
    """Bytes of a tensor in memory: those of the file, but for types that get codes of their own."""
    own = UNPACKED_TYPES.get(info.type.name)
    return info.nbytes if own is None else math.prod(info.shape) // SUPERBLOCK * own


@pytest.mark.capabilities(86, 120)
def test_prompts_in_int8_move_what_is_said_as_far_as_on_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linears of 4 bits in all layers but the last, and only where the step says so."""
    monkeypatch.setattr(int8_matmul, "is_faster", lambda *_: True)
    source = open_model(write_llama(tmp_path / "model.gguf", ("Q4_0",), layers=2))
    cpu, backend = torch.device("cpu"), select_backend(torch.device("cuda"))
    plain = load_decoder(source, backend, cpu, torch.float16)
    rounding = replace(plain, prompts=PromptLayers(plain.layers, backend))
    exact = load_decoder(source, REFERENCE, cpu, torch.float32)
    first, last = exact.layers
    rounded = replace(exact, layers=(with_linears(first, rounding_linear), last))
    token_ids = [token % 100 for token in (TOKEN_IDS * 2)[:LEAST_ROWS]]
    said = logits_of(plain, token_ids)
    assert torch.equal(logits_of(rounding, token_ids), said)
    make = RaggedBatch.of
    monkeypatch.setattr(RaggedBatch, "of", lambda *a, **k: replace(make(*a, **k), prompts_from=0))
    expected = (logits_of(rounded, token_ids) - logits_of(exact, token_ids)).norm()
    moved = (logits_of(rounding, token_ids) - said).norm()
    assert 0.8 < moved / expected < 1.25  # a code turns to the next by the last bit of an input


def rounding_linear(linear: object) -> RoundingLinear | None:
    return RoundingLinear(linear, 32) if isinstance(linear, DenseLinear) else None


# A token's experts renormalised; of groups, beside a shared one; with biases, a clamp and sinks;
# beside an MLP, in layers of unlike heads whose keys are their values.
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "gpt_oss", "gemma4"])
def test_a_model_with_experts_says_what_it_says_one_expert_after_another(
    family: str, tmp_path: Path
) -> None:
    save_experts(family, tmp_path)
    found, expected = (
        load_decoder(open_model(tmp_path), backend, torch.device("cpu"), torch.float32)
        for backend in (select_backend(torch.device("cuda")), REFERENCE)
    )
    assert found.is_enqueued
    assert not expected.is_enqueued
    assert found.weight_bytes >= expected.weight_bytes, "experts are counted, with their padding"
    token_ids = [token % 50 for token in TOKEN_IDS[:24]]
    torch.testing.assert_close(
        logits_of(found, token_ids, chunks=[17, 1, 5, 1]),
        logits_of(expected, token_ids),
        atol=2e-4,
        rtol=0,
    )


# Convolutions alone; gated deltas; Mamba-2. Slots hold the states of several layers.
@pytest.mark.parametrize("family", ["lfm2", "qwen3_5", "nemotron_h"])
def test_a_hybrid_model_says_what_it_says_on_the_reference(family: str, tmp_path: Path) -> None:
    model_type, settings = RECURRENT[family]
    torch.manual_seed(0)
    sizes = model_families.SIZES | {"num_hidden_layers": 3} | SIZES
    model = random_model(model_type, **sizes | settings)
    model.save_pretrained(tmp_path)
    found, expected = (
        logits_in_steps(
            load_decoder(open_model(tmp_path), backend, torch.device("cpu"), torch.float32),
            [token % 50 for token in TOKEN_IDS],
            chunks,
        )
        for backend, chunks in (
            (select_backend(torch.device("cuda")), [17, 1, 1, 21]),
            (REFERENCE, [40]),
        )
    )
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("form", "gated"),
    [
        ("int4", True),
        ("int4", False),
        ("int4 in act order", True),
        ("int4 in unlike orders", True),
        ("fp8 rows", True),
        ("fp8 blocks", True),
    ],
)
def test_packed_experts_are_stacked_from_their_parts(form: str, gated: bool) -> None:
    # Rows that are no whole tile or block, and an odd number of tiles.
    width, middle = (128, 128) if form == "fp8 blocks" else (64, 96)
    experts = [
        MLPWeights(
            [part(form, middle, width, number, i) for i in range(1 + gated)],
            part(form, 40, middle, number),
        )
        for number in (0, 10, 20)
    ]
    activation = Activation.SILU if gated else Activation.RELU_SQUARED
    spec = ExpertsSpec(middle, activation, Router(3, 2), gated=gated)
    stacked = stack_experts(experts, spec)
    assert stacked is not None
    assert (stacked.up is not None) is (form == "int4 in unlike orders")
    prepare = select_backend(torch.device("cuda")).prepare_experts
    assert prepare is not None
    grouped = prepare(stacked, torch.bfloat16)
    assert grouped is not None
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, width, generator=random).to(torch.bfloat16)
    ids, weights = torch.tensor([[0, 2], [1, 0], [2, 1], [2, 0], [0, 1]]), torch.rand(5, 2)
    builder = LayerBuilder(REFERENCE, torch.bfloat16, NO_LAYERS)
    each = [builder.mlp(expert, spec) for expert in experts]
    expected = torch.stack(
        [
            sum((each[i](hidden[[row]])[0].float() * w for i, w in zip(*choice, strict=True)), 0)
            for row, choice in enumerate(zip(ids.tolist(), weights, strict=True))
        ]
    )
    bound = 2e-2 * float(expected.abs().max())
    found = grouped(hidden, ChosenExperts(ids, weights))
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=bound)
    dense = replace(experts[2], down=LinearPart(torch.randn(40, middle), None))
    assert stack_experts([*experts[:2], dense], spec) is None, "one launch has one packing"


# A shared MLP as wide as three experts. One in act order cannot be cut, and stays apart.
@pytest.mark.parametrize(
    ("form", "gated", "cuts"),
    [
        ("dense", True, 3),
        ("int4", True, 3),
        ("int4", False, 3),
        ("int4 in act order", True, 0),
        ("fp8 rows", True, 3),
        ("fp8 blocks", True, 3),
    ],
)
def test_a_shared_mlp_is_cut_into_experts_whose_sum_is_its_output(
    form: str, gated: bool, cuts: int
) -> None:
    width, middle = (128, 128) if form == "fp8 blocks" else (64, 96)
    activation = Activation.SILU if gated else Activation.RELU_SQUARED

    def mlp(size: int, number: int) -> MLPWeights:
        inner = [part(form, size, width, number, i) for i in range(1 + gated)]
        return MLPWeights(inner, part(form, 40, size, number))

    experts, shared = [mlp(middle, number) for number in (0, 10)], mlp(3 * middle, 20)
    own = MLPSpec(3 * middle, activation, gated=gated)
    spec = ExpertsSpec(middle, activation, Router(2, 1), gated=gated, shared=own)
    kernels = select_backend(torch.device("cuda"))
    grouped, found = group_experts(experts.__getitem__, shared, spec, kernels, torch.bfloat16)
    assert grouped is not None
    assert found == cuts
    hidden = torch.randn(5, width, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids, weights = torch.tensor([[0], [1], [0], [1], [1]]), torch.rand(5, 1) + 0.5
    factors = torch.rand(5, 1)  # of the shared MLP, of each row
    builder = LayerBuilder(REFERENCE, torch.bfloat16, NO_LAYERS)
    each = [builder.mlp(expert, spec)(hidden).float() for expert in experts]
    expected = torch.stack([each[i][row] for row, (i,) in enumerate(ids.tolist())]) * weights
    if cuts:
        expected += builder.mlp(shared, own)(hidden).float() * factors
    always = torch.arange(2, 2 + cuts).expand(5, cuts)
    chosen = ChosenExperts(
        torch.cat((ids, always), dim=1), torch.cat((weights, factors.expand(5, cuts)), dim=1)
    )
    bound = 2e-2 * float(expected.abs().max())
    torch.testing.assert_close(grouped(hidden, chosen).float(), expected, rtol=0, atol=bound)


def part(form: str, out_features: int, in_features: int, expert: int, nth: int = 0) -> LinearPart:
    """A linear of an expert; in act order, those that read the same input mostly have its order."""
    random = torch.Generator().manual_seed(expert + nth)
    shape = out_features, in_features
    if form == "dense":
        return LinearPart(torch.randn(shape, generator=random) * in_features**-0.5, None)
    if form.startswith("fp8"):
        blocks = (-(-out_features // 128), -(-in_features // 128))
        scales = torch.rand(blocks if form == "fp8 blocks" else shape[:1], generator=random)
        codes = torch.randn(shape, generator=random).to(torch.float8_e4m3fn)
        return LinearPart(Fp8Weight(codes, (scales + 0.5) / 16), None)
    rows = torch.randperm(out_features, generator=random)
    weight = random_packed(*shape, 32).rows(rows)
    if form == "int4":
        return LinearPart(weight, None)
    seed = expert + nth if form == "int4 in unlike orders" else expert
    order = torch.randperm(in_features, generator=torch.Generator().manual_seed(seed)).int()
    return LinearPart(replace(weight, input_order=order), None)


def test_gate_and_up_of_one_packing_are_one_operation_on_the_kernels() -> None:
    parts = [LinearPart(random_packed(128, 64, 32), None) for _ in range(2)]
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    found = {}
    for backend in (select_backend(torch.device("cuda")), REFERENCE):
        builder = LayerBuilder(backend, torch.bfloat16, NO_LAYERS)
        linear = builder.gated(parts, Activation.SILU)
        assert linear.out_features == 128
        assert builder.nbytes == linear.nbytes > 0
        assert isinstance(linear, GatedLinear) == (backend is REFERENCE)
        found[backend.name] = linear(x)
    torch.testing.assert_close(found["triton"], found["reference"], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "parts",
    [
        [random_packed(128, 64, 32), random_packed(128, 64, 64)],
        [torch.randn(128, 64), torch.randn(128, 64)],
        [random_packed(12, 64, 32), random_packed(12, 64, 32)],
    ],
)
def test_what_the_fused_kernel_does_not_cover_is_two_operations(parts: list[Weight]) -> None:
    builder = LayerBuilder(select_backend(torch.device("cuda")), torch.bfloat16, NO_LAYERS)
    linear = builder.gated([LinearPart(part, None) for part in parts], Activation.SILU)
    assert isinstance(linear, GatedLinear)
