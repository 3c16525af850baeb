"""EXL3 folders: values as ExLlamaV3's own kernels make them, and models that are read of them.

The expected numbers were printed by `reconstruct_kernel` and `reconstruct_had_kernel` of exllamav3
(commit 4f8ad01, MIT), compiled for a CPU with a thread for each lane and executed on these words.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from shutil import copyfile
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.models.teacher_forcing import logits_of
from support.quant.exl3_folders import exl3_parts, write_exl3
from torch import Tensor

from appliance import LLM, SamplingParams
from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.kernels.backend import REFERENCE
from appliance.kernels.weights.packed import PackedWeight
from appliance.kernels.weights.weight import dense
from appliance.model.loader import load_decoder
from appliance.model.source import open_model
from appliance.model_files.checkpoint import SafetensorsFolder
from appliance.quant.formats import open_weights
from appliance.quant.formats.exl3 import Exl3Weights, codebook, states

FolderOf = Callable[[dict[str, Tensor], object], SafetensorsFolder]
MakeFolder = Callable[..., Path]
MODULE = "model.layers.0.mlp.up_proj"
NAME = MODULE + ".weight"
CONFIG: dict[str, Any] = {"quant_method": "exl3", "version": "1.4.1", "bits": 4.25, "head_bits": 6}
KINDS = ("", ".mcg", ".mul1")
MULTIPLIERS = {"": 89226354, ".mcg": 0xCBAC1FED, ".mul1": 0x83DCD12D}
# By codebook and bits: SHA-256, in part, of a 128 x 128 weight before it is rotated back.
DIGESTS: dict[str, tuple[str, ...]] = {
    "": (
        "a376af69cdaf0dfd",
        "87b700a7dd6ab3e6",
        "70e48bb6fbfc173f",
        "cf1c2c3ac6dc6e35",
        "149ca9f299836249",
        "d946b21ba14dec0b",
        "85ac76b48a81da42",
        "82c3cf436f0c89af",
    ),
    ".mcg": (
        "f040fe57ed0a275b",
        "a7229b04b96a99a3",
        "6374c771c241a40c",
        "430a6bc865c834e9",
        "022607cfb855e0ea",
        "92a8fc06abc58a9b",
        "2d65d9a5c660204d",
        "588bdc53a3f72ebe",
    ),
    ".mul1": (
        "35458bbdb489b166",
        "ed48c59cb0a555fb",
        "4a8b930ec56dffd2",
        "fcbea9c03d8a94fe",
        "88c7a97e4a70f899",
        "c9617403e38fe8ba",
        "a4e04d94dbd3105e",
        "b80b8214fd8ad21f",
    ),
}
# The same weights rotated back and scaled: sums of magnitudes, and some of the values.
ROTATED: dict[str, tuple[tuple[float, ...], ...]] = {
    "": (
        (31.9037, -0.0175629, -0.0009966, 0.0014687, 0.0055809, -0.0041504, -0.0023232),
        (31.2779, 0.0074806, -0.0002391, 0.0016508, -0.0054932, 0.0019064, 0.0012045),
        (31.8706, 0.0084534, -0.0001323, -0.0003726, 0.0000581, 0.0012941, -0.0021496),
        (31.5860, -0.0053139, -0.0014973, 0.0003943, 0.0001428, 0.0081940, 0.0028820),
        (31.6903, 0.0044441, -0.0014915, -0.0000882, -0.0074768, 0.0063820, 0.0025806),
        (31.9083, -0.0067978, 0.0007334, 0.0013266, -0.0046883, 0.0107574, 0.0031948),
        (31.5546, 0.0037746, -0.0012283, -0.0000169, -0.0056496, -0.0016384, -0.0014687),
        (31.9490, 0.0058022, -0.0010166, 0.0019321, 0.0034447, -0.0003815, -0.0010328),
    ),
    ".mcg": (
        (31.4224, -0.0019417, 0.0007720, -0.0024452, -0.0001260, 0.0004146, 0.0011892),
        (32.1157, -0.0004473, 0.0004768, 0.0006790, 0.0065613, 0.0109024, 0.0011578),
        (31.4976, 0.0143890, -0.0003977, 0.0012159, 0.0000908, -0.0084915, 0.0005698),
        (31.2140, 0.0172119, -0.0000041, 0.0017643, 0.0029736, -0.0011816, -0.0027428),
        (31.9456, -0.0079956, -0.0006118, -0.0019131, 0.0084305, 0.0024128, 0.0014610),
        (31.4413, -0.0074730, -0.0013609, -0.0001320, -0.0044403, 0.0002373, -0.0008426),
        (32.0041, 0.0005765, 0.0012465, -0.0002573, 0.0083389, 0.0005617, 0.0026684),
        (31.6806, -0.0092316, 0.0002739, -0.0005584, 0.0066147, 0.0025349, -0.0001801),
    ),
    ".mul1": (
        (25.5371, -0.0068817, 0.0012379, -0.0001872, 0.0045929, 0.0102768, 0.0011730),
        (25.2435, -0.0097733, -0.0006456, 0.0005612, -0.0043640, 0.0038929, -0.0007658),
        (25.6385, -0.0010281, 0.0000781, 0.0004749, 0.0104828, -0.0121460, 0.0002033),
        (25.3759, 0.0013256, 0.0003989, -0.0010233, 0.0043793, -0.0049095, 0.0003145),
        (25.5975, 0.0112228, 0.0003638, 0.0014782, -0.0126572, -0.0039139, 0.0006161),
        (25.5696, -0.0073242, 0.0012188, 0.0003173, -0.0040741, -0.0000017, 0.0006270),
        (25.7374, 0.0070419, 0.0019131, -0.0009298, 0.0058098, 0.0043831, -0.0028896),
        (25.1607, -0.0204315, -0.0002332, -0.0013046, 0.0070724, 0.0008492, -0.0014830),
    ),
}
PLACES = ((0, 0), (0, 127), (127, 0), (5, 77), (64, 31), (100, 100))


def words_of(bits: int, kind: str) -> NDArray[np.int16]:
    """Return the words of tiles (8, 8, 16 * bits), mixed numbers."""
    number = np.arange(1, 64 * 16 * bits + 1, dtype=np.uint32) * np.uint32(2654435761)
    number += np.uint32(bits * 40503 + KINDS.index(kind) * 9176)
    number ^= number >> np.uint32(15)
    number *= np.uint32(2246822519)
    number ^= number >> np.uint32(13)
    words = (number >> np.uint32(8)).astype(np.uint16)
    return words.view(np.int16).reshape(8, 8, 16 * bits)


def parts_of(bits: int, kind: str) -> dict[str, Tensor]:
    place = torch.arange(128)
    parts = {
        ".trellis": torch.from_numpy(words_of(bits, kind)),
        ".suh": ((place * 37 % 64 - 31.5) / 64).half(),
        ".svh": ((place * 29 % 64 - 31.5) / 2048).half(),
    }
    if kind:
        stored = np.array([MULTIPLIERS[kind]], dtype=np.uint32).view(np.int32)
        parts[kind] = torch.from_numpy(stored).reshape(())
    return {MODULE + part: tensor for part, tensor in parts.items()}


def read(folder: SafetensorsFolder) -> Exl3Weights:
    reader = open_weights(folder)
    assert isinstance(reader, Exl3Weights)
    return reader


@pytest.mark.parametrize("kind", KINDS)
def test_values_before_rotation_are_bit_for_bit_those_of_exllamav3(kind: str) -> None:
    for bits in range(1, 9):
        words = words_of(bits, kind).view(np.uint16)
        values = codebook(kind, MULTIPLIERS[kind])[states(words, bits)]
        stored = np.ascontiguousarray(values.T.astype(np.float16))  # theirs has inputs first
        digest = hashlib.sha256(stored.tobytes()).hexdigest()
        assert digest[:16] == DIGESTS[kind][bits - 1], bits


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_exllamav3_up_to_its_float16_sums(
    folder_of: FolderOf, kind: str
) -> None:
    for bits in range(1, 9):
        found = read(folder_of(parts_of(bits, kind), CONFIG)).unpacked(NAME).double()
        total, *values = ROTATED[kind][bits - 1]
        # Their 128 ** -0.5 is of float16: 1e-4 too small, once a side.
        assert float(found.abs().sum()) == pytest.approx(total * (1 + 2.1e-4), rel=1e-4)
        for (row, column), value in zip(PLACES, values, strict=True):
            assert float(found[column, row]) == pytest.approx(value, abs=1e-4)


def test_signs_alone_are_read_as_the_first_files_have_them(folder_of: FolderOf) -> None:
    parts = parts_of(4, "")
    signs = torch.where(parts[MODULE + ".suh"] < 0, -1.0, 1.0)
    bits = (signs < 0).reshape(-1, 16).int() << torch.arange(16)
    short = {name: part for name, part in parts.items() if name != MODULE + ".suh"}
    short[MODULE + ".su"] = bits.sum(1).to(torch.int16)
    expected = read(folder_of(parts | {MODULE + ".suh": signs.half()}, CONFIG)).unpacked(NAME)
    assert torch.equal(read(folder_of(short, CONFIG)).unpacked(NAME), expected)


def test_weights_are_held_in_8_bits_and_that_is_said(folder_of: FolderOf) -> None:
    reader = read(folder_of(parts_of(4, ".mul1") | {"model.norm.weight": torch.ones(4)}, CONFIG))
    assert reader.tensor_names() == [NAME, "model.norm.weight"]
    assert (reader.packed_bits(NAME), reader.group_size(NAME)) == (8, 128)
    assert reader.packed_bits("model.norm.weight") is None
    held, exact = reader.load(NAME), reader.unpacked(NAME).double()
    assert isinstance(held, PackedWeight)
    step = held.scale.double().abs()
    assert float(((dense(held, torch.float64) - exact).abs() / step).max()) < 0.51 + 127 * 2**-9
    assert float((dense(held, torch.float64) - exact).square().sum() / exact.square().sum()) < 8e-5
    assert "of 4 bits in the folder, are held in 8 bits" in reader.notes()[0]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({".trellis": torch.zeros(8, 8, 60, dtype=torch.int16)}, "symbols of int16"),
        ({".trellis": torch.zeros(8, 8, 144, dtype=torch.int16)}, "symbols of int16"),
        ({".trellis": torch.zeros(7, 8, 64, dtype=torch.int16)}, "symbols of int16"),
        ({".trellis": torch.zeros(8, 8, 64, dtype=torch.int32)}, "symbols of int32"),
        ({".suh": torch.ones(96).half()}, "96 numbers for 128"),
        ({".svh": torch.full((128,), torch.inf).half()}, "or NaN, in svh"),
        ({".svh": None}, "no svh"),
    ],
)
def test_damaged_weights_are_refused_by_name(
    folder_of: FolderOf, change: dict[str, Tensor | None], named: str
) -> None:
    parts = parts_of(4, "") | {MODULE + part: tensor for part, tensor in change.items()}
    kept = {name: tensor for name, tensor in parts.items() if tensor is not None}
    with pytest.raises(CheckpointError, match=f"{MODULE} has .*{named}"):
        read(folder_of(kept, CONFIG)).load(NAME)


@pytest.mark.parametrize(
    ("module", "part", "config", "named"),
    [
        (MODULE + ".slice.1", "", {}, r"slice\.1 is a part of a linear"),
        (MODULE, ".scale", {}, "first version"),
        ("model.layers.0.mlp.experts.3.up_proj", "", {"model_type": "laguna"}, "experts.*scaled"),
    ],
)
def test_variants_are_refused_by_name_with_what_to_do(
    folder_of: FolderOf, module: str, part: str, config: dict[str, str], named: str
) -> None:
    parts = {name.replace(MODULE, module): tensor for name, tensor in parts_of(4, "").items()}
    folder = folder_of(parts | ({module + part: torch.ones(1)} if part else {}), CONFIG)
    folder.config = dict(folder.config) | config
    with pytest.raises(UnsupportedModelError, match=f"{named}.*appliance quantize MODEL, or serve"):
        open_weights(folder)


def test_parts_without_settings_are_refused(folder_of: FolderOf) -> None:
    with pytest.raises(UnsupportedModelError, match=r"up_proj\.trellis is a part of a quantized"):
        open_weights(folder_of(parts_of(4, ""), None))


@pytest.mark.parametrize("in_torch", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_of_padded_weights_is_nearly_the_one_that_it_was_made_from(
    make_llama: MakeFolder, tmp_path: Path, in_torch: bool, tied: bool
) -> None:
    plain = make_llama(tie_word_embeddings=tied)  # of 96 inputs and 50 tokens
    source = open_model(write_exl3(plain, tmp_path / "exl3", 8), in_torch=in_torch)
    assert not source.spec.tied_head  # the head has bits of its own
    assert source.weights.shape("model.layers.0.self_attn.k_proj.weight") == (32, 96)
    original = open_model(plain)
    for slot in source.slots():
        name = slot.name
        if tied and name == "lm_head.weight":
            name = "model.embed_tokens.weight"
        expected = dense(original.weights.load(name), torch.float64)
        held: Any = source.weights.load(slot.name)
        found = torch.tensor(dense(held, "float32").numpy()).double()
        error = float((found - expected).square().sum() / expected.square().sum())
        assert error < 0.01, slot.name
    if in_torch:
        logits = [
            logits_of(
                load_decoder(each, REFERENCE, torch.device("cpu"), torch.float32), list(range(20))
            ).log_softmax(-1)
            for each in (original, source)
        ]
        divergence = (logits[0].exp() * (logits[0] - logits[1])).sum(-1).mean()
        assert float(divergence) < 0.02


def test_a_model_is_served_as_it_is_held(model: Path, tmp_path: Path) -> None:
    coded = write_exl3(model, tmp_path / "exl3", 6, ".mul1")
    copyfile(model / "tokenizer.json", coded / "tokenizer.json")
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    decoder = load_decoder(open_model(coded), REFERENCE, torch.device("cpu"), torch.float32)
    expected = logits_of(decoder, tokens).log_softmax(-1)[-1]
    served = LLM(str(coded), device="cpu", max_model_len=48, threads=1, speculate="off")
    wanted = SamplingParams(temperature=0, max_tokens=1, logprobs=0)
    (answer,) = served.generate([tokens], wanted, progress=False)
    (token,) = answer.outputs[0].token_ids
    assert answer.outputs[0].cumulative_logprob == pytest.approx(float(expected[token]), abs=0.05)
    assert float(expected.max() - expected[token]) < 0.05


def test_linears_that_a_family_joins_are_joined(folder_of: FolderOf) -> None:
    layer = "model.layers.0."
    generator = torch.Generator().manual_seed(3)
    heights = {
        "self_attn.qkv_proj": {
            "self_attn.q_proj": 256,
            "self_attn.k_proj": 128,
            "self_attn.v_proj": 128,
        },
        "mlp.gate_up_proj": {"mlp.gate_proj": 96, "mlp.up_proj": 96},
    }
    weights = {
        layer + part: torch.randn(rows, 96, generator=generator)
        for parts in heights.values()
        for part, rows in parts.items()
    }
    tensors: dict[str, Tensor] = {}
    for part, weight in weights.items():
        tensors |= exl3_parts(part, weight, 8, ".mul1")
    reader = read(folder_of(tensors, CONFIG))
    wanted = {f"{layer}{name}.weight": (sum(parts.values()), 96) for name, parts in heights.items()}
    reader.fit(wanted)
    assert reader.tensor_names() == sorted(wanted)
    for name, parts in heights.items():
        whole = f"{layer}{name}.weight"
        assert reader.shape(whole) == wanted[whole]
        assert (reader.packed_bits(whole), reader.group_size(whole)) == (8, 32)
        expected = torch.cat([weights[layer + part] for part in parts]).double()
        for found in (dense(reader.load(whole), torch.float64), reader.unpacked(whole).double()):
            assert float((found - expected).square().mean()) < 0.01
