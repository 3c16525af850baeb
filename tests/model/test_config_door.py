"""Numbers in a stranger's settings: refused by name, or harmless to all code that gets them.

The fuzz runs what is accepted in the CPU library. `test_sanitizers` runs this file with a library
that stops at the first access out of bounds. APPLIANCE_TEST_HEADER_CASES sets the number of cases,
and APPLIANCE_TEST_HEADER_SEED selects them: the same seed gives the same cases in every run.
"""

from __future__ import annotations

import copy
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from support.models.family_settings import (
    EXPERTS,
    GGUF_SIZES,
    LLAMA3,
    OF_ARCHITECTURE,
    OF_FAMILY,
    SIZES,
)
from support.models.teacher_forcing import logits_of

from appliance.errors import ApplianceError, CheckpointError, ModelError
from appliance.kernels.backend import REFERENCE
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.library import LIBRARY, load_library
from appliance.model.families import limits
from appliance.model.families.limits import QUANTIZATION_RANGES, RANGES, check_quantization
from appliance.model.families.registry import FAMILIES
from appliance.model.loader import load_decoder
from appliance.model.native import why_unsupported
from appliance.model.native_loader import load_native
from appliance.model.source import ModelSource
from appliance.model.tensors import Role, tensor_slots
from appliance.quant.formats import awq, compressed_tensors_config, fp8, gptq

if TYPE_CHECKING:
    from appliance.model.families.family import Family
    from appliance.model.spec import DecoderSpec

# Removed, because the product refuses unknown variables with its prefix.
_PATH = Path(os.environ.pop("APPLIANCE_TEST_CPU_LIBRARY", LIBRARY))
CASES = int(os.environ.pop("APPLIANCE_TEST_HEADER_CASES", "300"))
SEED = int(os.environ.pop("APPLIANCE_TEST_HEADER_SEED", "0"))
MAX_WEIGHTS = 2**17  # most elements of a model that is built
ORIGIN = "/models/stranger/config.json"

EDGES = [
    0, -1, 1, 2, 3, 7, 8, 15, 16, 17, 18, 32, 48, 64, 100, 255, 256, 257, 272, 1024, 1025,
    2**15, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32 + 16, 2**62, 2**63, 2**64, 10**9,
    10**400, -(10**400), 0.0, -0.0, 0.1, 0.5, 0.999, 1.0001, 1.5, 2.0, 16.0, 1e9, 1e38, 1e308,
    5e-324, 1e-40, math.inf, -math.inf, math.nan, True, False, None, "16", "", [], [1], {},
    [1.0] * 8, ["x"], {"a": 1},
]  # fmt: skip
VALUES = st.sampled_from(EDGES) | st.integers(-3, 300) | st.floats(0.0, 4.0)


def family_of(model_type: str) -> Family:
    return next(family for family in FAMILIES if family.model_type == model_type)


class Weights:
    """All tensors of a spec, small and never equal in two columns."""

    def __init__(self, spec: DecoderSpec, family: Family) -> None:
        self._shapes = {slot.name: slot.shape for slot in tensor_slots(spec, family.names)}

    def tensor_names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def packed_bits(self, name: str) -> None:
        return None

    def group_size(self, name: str) -> int | None:
        return None

    def float_bits(self, name: str) -> int | None:
        return None

    def notes(self) -> tuple[str, ...]:
        return ()

    def load(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        return torch.linspace(-0.5, 0.5, math.prod(shape)).view(shape)


class Header:
    """The values that a family reads from a GGUF file before its tensors."""

    def __init__(self, architecture: str, settings: dict[str, Any]) -> None:
        self.path = Path("/models/stranger.gguf")
        self.metadata = {f"{architecture}.{key}": value for key, value in settings.items()}

    def tensor_names(self) -> list[str]:
        return ["token_embd.weight", "output.weight"]

    def shape(self, name: str) -> tuple[int, ...]:
        return (40, 32)


def run(spec: DecoderSpec, family: Family) -> str:
    """Build the model and run some tokens through it; return what executed it."""
    slots = tensor_slots(spec, family.names)
    if sum(math.prod(slot.shape) for slot in slots) > MAX_WEIGHTS or spec.vocab_size < 4:
        return "not built"
    source = ModelSource(Path("stranger"), family, {}, spec, Weights(spec, family))
    # No more tokens than the model has positions, beyond which engines do not go either.
    tokens = [token % spec.vocab_size for token in range(3, 24)][: spec.context_length]
    ends = [min(end, len(tokens)) for end in (0, 12, 13, 21)]
    chunks = [end - begin for begin, end in pairwise(ends) if end > begin]
    if why_unsupported(source) is not None:
        decoder = load_decoder(source, REFERENCE, torch.device("cpu"), torch.float32)
        found = logits_of(decoder, tokens[:3])
        assert tuple(found.shape) == (len(tokens[:3]), spec.vocab_size)
        return "torch"
    engine = NativeEngine(load_library(_PATH), 1)
    native = load_native(source, engine, torch.float32)
    for format in (KVFormat.FP32, KVFormat.INT8):
        found = logits_of(native, tokens, chunks=chunks, format=format)
        assert tuple(found.shape) == (len(tokens), spec.vocab_size)
    engine.close()
    return "library"


def attempt(family: Family, origin: str, read: Callable[[], dict[str, Any]]) -> str:
    """Any settings are either refused, naming the file, or the model runs."""
    try:
        spec = family.spec(read(), origin)
    except ApplianceError as error:
        message = str(error)
    else:
        return run(spec, family)
    assert message.startswith(origin), message
    return "refused"


def many(function: Callable[..., None]) -> Callable[..., None]:
    slow_is_fine = [HealthCheck.too_slow, HealthCheck.data_too_large]
    given_cases = settings(max_examples=CASES, database=None, suppress_health_check=slow_is_fine)
    return seed(SEED)(given_cases(function))


@st.composite
def configs(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A model_type, and its settings with up to three random changes."""
    model_type = draw(st.sampled_from(sorted(OF_FAMILY)))
    config = SIZES | draw(st.sampled_from(OF_FAMILY[model_type]))
    for _ in range(draw(st.integers(0, 3))):
        key = draw(st.sampled_from([*config, "partial_rotary_factor", "rope_theta"]))
        if isinstance(config.get(key), dict) and draw(st.booleans()):
            inner = draw(st.sampled_from([*config[key], "partial_rotary_factor", "factor"]))
            config[key] = config[key] | {inner: draw(VALUES)}
        else:
            config[key] = draw(VALUES)
    return model_type, config


def check_outcomes(outcomes: Counter[str]) -> None:
    """The fuzz had enough cases, refused ones and accepted ones."""
    assert outcomes.total() >= CASES, outcomes
    assert min(outcomes["library"], outcomes["refused"]) > CASES / 20, outcomes


def test_settings_of_a_folder() -> None:
    outcomes: Counter[str] = Counter()

    @many
    @given(configs())
    def fuzz(drawn: tuple[str, dict[str, Any]]) -> None:
        model_type, config = drawn
        outcomes[attempt(family_of(model_type), ORIGIN, lambda: config)] += 1

    fuzz()
    check_outcomes(outcomes)


@st.composite
def headers(draw: st.DrawFn) -> Header:
    architecture = draw(st.sampled_from(sorted(OF_ARCHITECTURE)))
    metadata = GGUF_SIZES | OF_ARCHITECTURE[architecture]
    for _ in range(draw(st.integers(0, 3))):
        metadata[draw(st.sampled_from(sorted(metadata)))] = draw(VALUES)
    return Header(architecture, metadata)


def test_metadata_of_a_gguf_file() -> None:
    outcomes: Counter[str] = Counter()

    @many
    @given(headers())
    def fuzz(header: Header) -> None:
        architecture = next(iter(header.metadata)).partition(".")[0]
        family = next(f for f in FAMILIES if f.gguf and f.gguf.architecture == architecture)
        mapping = family.gguf
        assert mapping is not None
        read = partial(mapping.config, header)  # type: ignore[arg-type]
        outcomes[attempt(family, str(header.path), read)] += 1

    fuzz()
    check_outcomes(outcomes)


QUANTIZATION: list[dict[str, Any]] = [
    {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "gptq"},
    {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64},
                "targets": ["Linear"],
            }
        },
    },
]
READERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "awq": awq.declared_layout,
    "gptq": gptq.declared_layout,
    "fp8": fp8.quantizes_inputs,
    "compressed-tensors": compressed_tensors_config.declared_weights,
}


def places(value: Any) -> Iterator[tuple[dict[str, Any], str]]:
    for key, item in value.items():
        yield value, key
        if isinstance(item, dict):
            yield from places(item)


@many
@given(st.sampled_from(QUANTIZATION), st.data())
def test_settings_of_quantized_weights(base: dict[str, Any], data: st.DataObject) -> None:
    config = copy.deepcopy(base)
    found = [place for place in places(config) if place[1] != "quant_method"]
    inside, key = data.draw(st.sampled_from(found))
    inside[key] = data.draw(VALUES)
    try:
        check_quantization(config, ORIGIN)
        READERS[config["quant_method"]](config)
    except ApplianceError:
        pass


def refusal(changes: dict[str, Any], model_type: str = "phi3") -> str:
    with pytest.raises(ModelError) as caught:
        family_of(model_type).spec(SIZES | changes, ORIGIN)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5, but must be a number from"),
        ({"rope_parameters": {"partial_rotary_factor": 2}}, "partial_rotary_factor is 2"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, but must be a whole"),
        ({"num_attention_heads": 2**32}, "num_attention_heads is 4294967296"),
        ({"num_attention_heads": 64}, "num_attention_heads"),
        ({"head_dim": 2**31}, "head_dim is 2147483648"),
        ({"vocab_size": 10**400}, "vocab_size is a number of 401 digits"),
        ({"max_position_embeddings": 2**40}, "max_position_embeddings"),
        ({"sliding_window": 2**32}, "sliding_window is 4294967296"),
        ({"rms_norm_eps": 1e300}, "rms_norm_eps is 1e+300"),
        ({"rms_norm_eps": 5e-324}, "rms_norm_eps is 5e-324"),
        ({"rope_theta": 1.0}, "rope_theta is 1.0"),
        ({"partial_rotary_factor": 0.01}, "0 elements of each head would rotate"),
    ],
)
def test_a_number_out_of_range_is_named_with_its_file(changes: dict[str, Any], said: str) -> None:
    if changes == {"num_attention_heads": 64}:
        changes = changes | {"head_dim": None}  # 32 wide: half an element for each head
        said = "head_dim is 0"
    message = refusal(changes)
    assert message.startswith(ORIGIN)
    assert said in message


def test_heads_of_a_width_without_elements_for_each_are_refused() -> None:
    """Falcon's settings do not name the size of a head."""
    for changes in OF_FAMILY["falcon"]:
        message = refusal(changes | {"num_attention_heads": 64, "num_kv_heads": 64}, "falcon")
        assert message.startswith(ORIGIN)
        assert (
            "num_attention_heads = 64 is not supported; supported is at most hidden_size" in message
        )


def test_layers_are_counted_before_there_is_a_list_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of 10**9 layers would take 8 GB before any tensor is read."""
    monkeypatch.setitem(limits.RANGES, "num_hidden_layers", limits.Range(1, 3))
    for family in FAMILIES:
        changes = OF_FAMILY[family.model_type][0] | {"num_hidden_layers": 4, "sliding_window": 3}
        assert "num_hidden_layers is 4" in refusal(changes, family.model_type)


def test_experts_are_counted_before_there_is_a_list_of_them() -> None:
    changes = EXPERTS | {"num_experts": 4096, "num_hidden_layers": 1024}
    assert "1024 layers of 4096 experts are more than" in refusal(changes, "qwen3_moe")


def test_llama3_frequencies_out_of_order_are_refused() -> None:
    message = refusal({"rope_scaling": LLAMA3 | {"high_freq_factor": 0.5}}, "llama")
    assert "low_freq_factor is 1 and high_freq_factor 0.5" in message


def test_a_gguf_file_names_its_own_field() -> None:
    family = family_of("phi3")
    assert family.gguf is not None
    for key, value in (("rope.dimension_count", 18), ("block_count", 10**9)):
        header = Header("phi3", GGUF_SIZES | {key: value})
        with pytest.raises(ApplianceError, match=rf"^/models/stranger\.gguf: phi3: {key}"):
            family.gguf.config(header)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(4, 4), (2**30,), None])
def test_rope_factors_of_a_gguf_file_are_looked_at_before_they_are_read(
    shape: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["token_embd.weight", "rope_factors_long.weight"]
    if shape is not None:
        names.append("rope_factors_short.weight")
    monkeypatch.setattr(Header, "tensor_names", lambda header: names)
    monkeypatch.setattr(Header, "shape", lambda header, name: shape if "rope" in name else (40, 32))
    family = family_of("phi3")
    assert family.gguf is not None
    with pytest.raises(CheckpointError, match=r"tensor rope_factors_short\.weight"):
        family.gguf.config(Header("phi3", GGUF_SIZES))  # type: ignore[arg-type]


@pytest.mark.parametrize("key", sorted(QUANTIZATION_RANGES))
@pytest.mark.parametrize("value", [2**40, 4.0, True, "4", [128, 2**40]])
def test_numbers_of_quantization_are_named_with_their_file(key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=f"^{ORIGIN}: {key} is "):
        check_quantization({"config_groups": {"group_0": {"weights": {key: value}}}}, ORIGIN)


def test_every_range_can_be_said_in_words() -> None:
    for usual in (*RANGES.values(), *QUANTIZATION_RANGES.values()):
        assert limits.in_words(usual).startswith("from ")
        assert usual.least in usual
        assert usual.most in usual
        assert math.nan not in usual


def test_the_tiny_models_are_of_all_roles() -> None:
    """Otherwise the fuzz would not reach the code of some roles."""
    for model_type, extras in OF_FAMILY.items():
        family = family_of(model_type)
        spec = family.spec(SIZES | extras[0], ORIGIN)
        roles = {slot.role for slot in tensor_slots(spec, family.names)}
        assert roles >= {Role.EMBEDDING, Role.NORM, Role.OUTPUT, Role.DOWN}
        assert run(spec, family) == "library"
