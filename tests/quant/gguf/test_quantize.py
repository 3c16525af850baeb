"""`quantize --format gguf`: from a GGUF file or a folder to one file, which two readers check."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from support.gguf.ggml_models import write_llama
from torch import Tensor

from appliance.errors import ConfigError, ModelError, QuantizeError
from appliance.kernels.weights.ggml import GgmlWeight
from appliance.kernels.weights.weight import dense
from appliance.model.source import open_model
from appliance.progress.quantize_events import QuantizeEvent, UnitFinished
from appliance.quant.formats.ggml_forms import BlockScheme
from appliance.quant.gguf.tensors import FileSettings
from appliance.quant.methods import data_free
from appliance.quant.quality.facts import facts_of_run, keep_facts
from appliance.quant.run.options import (
    Method,
    QuantizeOptions,
    WeightFormat,
    read_asked,
)
from appliance.quant.run.pipeline import quantize_model
from appliance.quant.text.calibration import CalibrationText
from appliance.tokenizer import Tokenizer

MakeFolder = Callable[..., Path]
DOWN = "model.layers.1.mlp.down_proj.weight"


class Stop(Exception):  # noqa: N818
    """Represents anything that ends a run."""


def weights_of(path: Path) -> dict[str, Tensor]:
    source = open_model(path)
    return {
        slot.name: dense(source.weights.load(slot.name), torch.float32) for slot in source.slots()
    }


def types_of(path: Path) -> Counter[str]:
    return Counter(tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("base") / "base.gguf", ["Q8_0"], tied=False)


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("Q4_0", {"Q4_0": 22, "Q6_K": 1, "F32": 7}),
        ("Q4_1", {"Q4_1": 22, "Q6_K": 1, "F32": 7}),
        ("Q3_K_S", {"Q3_K": 22, "Q6_K": 1, "F32": 7}),
        ("IQ4_XS", {"IQ4_XS": 22, "Q6_K": 1, "F32": 7}),
        ("IQ4_NL", {"IQ4_NL": 22, "Q6_K": 1, "F32": 7}),
        ("Q5_K_S", {"Q5_K": 22, "Q6_K": 1, "F32": 7}),
        ("Q6_K", {"Q6_K": 23, "F32": 7}),
        ("Q8_0", {"Q8_0": 23, "F32": 7}),
    ],
)
def test_a_file_holds_the_nearest_codes_of_its_types(
    base: Path, tmp_path: Path, name: str, types: dict[str, int]
) -> None:
    chosen = QuantizeOptions.of_type(name)
    report = quantize_model(base, tmp_path / "out", chosen)
    assert report.out == tmp_path / "out" / "out.gguf"
    assert [path.name for path in report.out.parent.iterdir()] == ["out.gguf"]
    assert types_of(report.out) == types
    exact, found = weights_of(base), weights_of(report.out)
    head = BlockScheme("Q8_0" if name == "Q8_0" else "Q6_K")
    for name, weight in found.items():
        scheme = chosen.scheme if "layers" in name or "embed" in name else head
        if weight.dim() == 2:
            expected = data_free.quantize(exact[name], scheme, Method.RTN, torch.float16)
            assert torch.equal(weight, expected.dequantize()), name
        else:
            assert torch.equal(weight, exact[name]), name
    reader = gguf.GGUFReader(report.out)
    stored = {tensor.name: tensor for tensor in reader.tensors}["blk.1.ffn_down.weight"]
    read = dequantize(stored.data, stored.tensor_type)
    np.testing.assert_allclose(read, found[DOWN].numpy(), atol=1e-6)
    number = reader.fields["general.file_type"].contents()
    assert gguf.LlamaFileType(number).name == f"MOSTLY_{chosen.file_type}"
    assert reader.fields["llama.context_length"].contents() == 128
    assert reader.fields["tokenizer.ggml.pre"].contents() == "gpt-2"


@pytest.mark.parametrize("is_apart", [False, True])
def test_a_file_of_a_tied_model_has_a_head_if_its_values_are_others(
    make_folder: MakeFolder, tmp_path: Path, is_apart: bool
) -> None:
    own = torch.randn(50, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    head = {"lm_head.weight": own} if is_apart else {}
    folder = make_folder(tie_word_embeddings=True, tensors=head)
    out = quantize_model(folder, tmp_path / "out", QuantizeOptions.of_type("Q8_0")).out
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(out).tensors}
    if not is_apart:
        assert "output.weight" not in stored
        return
    read = dequantize(stored["output.weight"].data, stored["output.weight"].tensor_type)
    np.testing.assert_allclose(read, own.float().numpy(), atol=0.03)


def test_a_folder_becomes_a_file_with_its_settings_and_tokens(
    make_folder: MakeFolder, tmp_path: Path
) -> None:
    folder = make_folder(rope_theta=500000.0, max_position_embeddings=4096, rms_norm_eps=2**-17)
    report = quantize_model(folder, tmp_path / "out", QuantizeOptions.of_type("Q8_0"))
    assert types_of(report.out) == {"Q8_0": 16, "F32": 5}
    ours, theirs = open_model(folder).spec, open_model(report.out).spec
    assert theirs == ours
    exact, found = weights_of(folder), weights_of(report.out)
    assert found.keys() == exact.keys()
    for name, weight in found.items():  # the file orders the rows of queries and keys differently
        expected = exact[name]
        if expected.dim() == 2:
            scheme = BlockScheme("Q8_0")
            expected = data_free.quantize_linear(expected, None, scheme, torch.float16).dequantize()
        assert torch.equal(weight, expected), name
    one, other = Tokenizer.from_path(folder), Tokenizer.from_path(report.out)
    text = "abba bab<|im_end|> cab"
    assert one.encode(text, add_special_tokens=True) == other.encode(text, add_special_tokens=True)
    assert one.eos_token_ids == other.eos_token_ids
    asked = [{"role": "user", "content": "ab"}]
    assert one.encode_chat(asked) == other.encode_chat(asked)
    keep_facts(report)
    found_facts = facts_of_run(report.out)
    assert found_facts is not None
    assert found_facts.method == "rtn"


def test_stretched_frequencies_of_llama_3_are_written_as_factors(
    make_folder: MakeFolder, tmp_path: Path
) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    }
    folder = make_folder(rope_scaling=scaling, max_position_embeddings=8192)
    report = quantize_model(folder, tmp_path / "out", QuantizeOptions.of_type("Q4_0"))
    (factors,) = [t for t in gguf.GGUFReader(report.out).tensors if t.name == "rope_freqs.weight"]
    assert factors.data[0] == 1.0
    assert factors.data[-1] == pytest.approx(8.0)


def test_gptq_rounds_to_the_files_own_grid_and_a_resumed_run_writes_the_same(
    make_folder: MakeFolder, text: Path, tmp_path: Path
) -> None:
    folder = make_folder(num_attention_heads=8, num_key_value_heads=4)
    rows = CalibrationText(text, num_tokens=480, row_tokens=48)
    chosen = QuantizeOptions.of_type("Q4_K_S", method=Method.AWQ_GPTQ, text=rows)

    def stop(event: QuantizeEvent) -> None:
        if isinstance(event, UnitFinished) and event.name == "layer 0":
            raise Stop

    with pytest.raises(Stop):
        quantize_model(folder, tmp_path / "again" / "out", chosen, stop)
    resumed = quantize_model(folder, tmp_path / "again" / "out", chosen)
    report = quantize_model(folder, tmp_path / "out", chosen)
    assert resumed.out.read_bytes() == report.out.read_bytes()
    assert types_of(report.out) == {"Q4_K": 13, "Q5_K": 2, "Q6_K": 1, "F32": 5}
    assert any("adapters" in note for note in report.notes)
    rounded = quantize_model(folder, tmp_path / "rounded", QuantizeOptions.of_type("Q4_K_S"))
    assert 0 < max(report.losses.values()) < 0.1
    one, other = (open_model(run.out).weights.load(DOWN) for run in (report, rounded))
    assert isinstance(one, GgmlWeight)
    assert isinstance(other, GgmlWeight)
    assert not torch.equal(one.blocks, other.blocks)


def test_rows_that_no_super_block_divides_get_smaller_blocks_and_a_note(
    make_folder: MakeFolder, tmp_path: Path
) -> None:
    folder = make_folder(hidden_size=96, intermediate_size=256)
    report = quantize_model(folder, tmp_path / "out", QuantizeOptions.of_type("Q4_K_S"))
    assert types_of(report.out) == {"Q5_0": 11, "Q5_1": 2, "Q4_K": 2, "Q8_0": 1, "F32": 5}
    assert "11 weights as Q5_0, not Q4_K: 96 inputs do not divide by 256" in report.notes
    assert "2 weights as Q5_1, not Q5_K: 96 inputs do not divide by 256" in report.notes
    assert "1 weights as Q8_0, not Q6_K: 96 inputs do not divide by 256" in report.notes


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ({"bits": 7}, "--bits 7 names no GGUF type; use 2, 3, 4, 5, 6, 8, or --type"),
        ({"file_type": "IQ3_S"}, "'IQ3_S' is not known; use Q2_K, .*, Q4_K_M, .*, Q8_0"),
        ({"file_type": "Q4_K_M", "bits": 4}, "leave --bits 4 out, and name a type"),
        ({"symmetric": True}, "groups and minima; leave --symmetric out"),
        ({"symmetric": False}, "groups and minima; leave --no-symmetric out"),
        ({"group_size": "64"}, "groups and minima; leave --group-size 64 out"),
        ({"method": Method.INT8, "file_type": "Q6_K"}, "--method int8 makes Q8_0; leave it or"),
        ({"format": WeightFormat.AWQ, "file_type": "Q6_K"}, "leave it or --format awq out"),
        ({"method": Method.FP8}, "--method fp8 makes no codes of a GGUF type; use --method int8"),
    ],
)
def test_words_that_name_no_type_are_refused(words: dict[str, object], complaint: str) -> None:
    given = {"method": None, "bits": None, "group_size": None, "symmetric": None} | words
    with pytest.raises(ConfigError, match=complaint):
        read_asked(**{"format": WeightFormat.GGUF} | given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({}, ("Q4_K_M", "Q4_K", Method.OPEN)),
        ({"bits": 5}, ("Q5_K_M", "Q5_K", Method.OPEN)),
        ({"bits": 8}, ("Q8_0", "Q8_0", Method.INT8)),
        ({"method": Method.INT8}, ("Q8_0", "Q8_0", Method.INT8)),
        ({"file_type": "q3_k"}, ("Q3_K_M", "Q3_K", Method.OPEN)),
        ({"file_type": "IQ4_NL", "method": Method.GPTQ}, ("IQ4_NL", "IQ4_NL", Method.GPTQ)),
    ],
)
def test_words_name_a_type(words: dict[str, object], expected: tuple[str, str, Method]) -> None:
    given = {"method": None, "bits": None, "group_size": None, "symmetric": None} | words
    asked = read_asked(**given, format=WeightFormat.GGUF)  # type: ignore[arg-type]
    assert (asked.file_type, str(asked.scheme), asked.method) == expected


def test_what_a_file_cannot_say_is_refused_before_any_work(
    make_folder: MakeFolder, make_llama: MakeFolder, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="holds no plan of --kv-bits; leave it out"):
        QuantizeOptions.of_type("Q4_0", kv_bits=6.0)
    unread = make_llama("unread")
    with pytest.raises(ModelError, match=r"tokenizer.json is damaged"):
        quantize_model(unread, tmp_path / "out", QuantizeOptions.of_type("Q4_0"))
    kind = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    mistral = make_folder("mistral", **kind, sliding_window=32)
    with pytest.raises(
        QuantizeError, match=r"GGUF: the file: llama: attention.sliding_window = 32 is"
    ):
        quantize_model(mistral, tmp_path / "out", QuantizeOptions.of_type("Q4_0"))
    rules = (mistral / "tokenizer.json").read_text()
    other = make_folder("other", **kind, sliding_window=None)
    (other / "tokenizer.json").write_text(rules.replace('"use_regex": true', '"use_regex": false'))
    with pytest.raises(QuantizeError, match=r"has rules of its own to split words.*as the base"):
        quantize_model(other, tmp_path / "out", QuantizeOptions.of_type("Q4_0"))
    assert not (tmp_path / "out").exists()
    (other / "tokenizer.json").write_text(rules)
    report = quantize_model(other, tmp_path / "out", QuantizeOptions.of_type("Q4_0"))
    assert open_model(report.out).spec.architecture == "llama"


def edited(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Change a folder's tokenizer.json in place."""
    rules = json.loads((folder / "tokenizer.json").read_text())
    change(rules)
    (folder / "tokenizer.json").write_text(json.dumps(rules))
    return folder


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda rules: rules["model"].update(merges=[]), "a vocabulary of bytes without merges"),
        (lambda rules: rules["model"]["vocab"].update({"ba": 60}), "token 'ba' of id 60, beyond"),
        (
            lambda rules: rules["added_tokens"].extend(
                rules["added_tokens"][0] | {"content": f"<{number}>", "id": number}
                for number in (49, 50)
            ),
            "token '<50>' of id 50, beyond the 50 rows",
        ),
        (
            lambda rules: rules.update(
                model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
            ),
            "a WordLevel model",
        ),
    ],
    ids=["no merges", "beyond the embedding", "added beyond it", "words"],
)
def test_an_odd_vocabulary_is_one_line(
    make_folder: MakeFolder, tmp_path: Path, change: Callable[[Any], object], complaint: str
) -> None:
    folder = edited(make_folder(), change)
    with pytest.raises(QuantizeError, match=re.escape(complaint)) as caught:
        quantize_model(folder, tmp_path / "out", QuantizeOptions.of_type("Q8_0"))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_template_that_is_no_text_is_one_line(make_folder: MakeFolder, tmp_path: Path) -> None:
    folder = make_folder()
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": "\ud83d"}))
    with pytest.raises(QuantizeError, match="surrogates not allowed"):
        quantize_model(folder, tmp_path / "out", QuantizeOptions.of_type("Q8_0"))


def test_blocks_that_draft_are_kept_as_they_are(base: Path, tmp_path: Path) -> None:
    """llama.cpp's loader wants the tensors of every block that `block_count` has."""
    source, folder = tmp_path / "with-head.gguf", tmp_path / "out"
    read = gguf.GGUFReader(base)
    architecture = read.fields["general.architecture"].contents()
    layers = read.fields[f"{architecture}.block_count"].contents()
    writer: Any = gguf.GGUFWriter(source, architecture)
    for key, field in read.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            more = key == f"{architecture}.block_count"
            inner = field.types[-1] if len(field.types) > 1 else None
            value = field.contents() + 1 if more else field.contents()
            writer.add_key_value(key, value, field.types[0], sub_type=inner)
    writer.add_nextn_predict_layers(1)
    head = {f"blk.{layers}.nextn.eh_proj.weight": np.arange(64 * 128.0).reshape(64, 128)}
    head[f"blk.{layers}.nextn.enorm.weight"] = np.linspace(0, 1, 64)
    for tensor in read.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        if tensor.name.startswith(f"blk.{layers - 1}."):
            name = tensor.name.replace(f"blk.{layers - 1}.", f"blk.{layers}.")
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, values in head.items():
        writer.add_tensor(name, values.astype(np.float16 if values.ndim > 1 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    quantize_model(source, folder, QuantizeOptions.of_type("Q8_0"))
    (out,) = folder.glob("*.gguf")
    theirs, ours = (
        {one.name: one for one in gguf.GGUFReader(path).tensors} for path in (source, out)
    )
    assert ours.keys() == theirs.keys()
    kept = [name for name in theirs if name.startswith(f"blk.{layers}.")]
    assert set(head) < set(kept)
    for name in kept:
        assert ours[name].tensor_type == theirs[name].tensor_type
        assert list(ours[name].shape) == list(theirs[name].shape)
        assert np.array_equal(ours[name].data, theirs[name].data), name
    fields = gguf.GGUFReader(out).fields
    assert fields[f"{architecture}.nextn_predict_layers"].contents() == 1
    assert fields[f"{architecture}.block_count"].contents() == layers + 1
    assert len(open_model(out).spec.layers) == layers


def test_empty_lists_of_a_base_are_left_out_unless_readers_need_them(tmp_path: Path) -> None:
    """The `gguf` package reads such lists but cannot write them."""
    path, text, some = tmp_path / "odd.gguf", gguf.GGUFValueType.STRING, gguf.GGUFValueType.ARRAY

    def keyed(key: str, *numbers: tuple[int, int]) -> bytes:
        packed = b"".join(number.to_bytes(size, "little") for number, size in numbers)
        return len(key).to_bytes(8, "little") + key.encode() + packed

    def write(key: str) -> None:
        head = b"GGUF" + b"".join(n.to_bytes(s, "little") for n, s in ((3, 4), (0, 8), (2, 8)))
        head += keyed("general.architecture", (text, 4), (5, 8)) + b"llama"
        path.write_bytes((head + keyed(key, (some, 4), (text, 4), (0, 8))).ljust(256, b"\0"))

    write("general.tags")
    assert FileSettings.of_file(path).settings == ()
    write("tokenizer.ggml.merges")
    with pytest.raises(QuantizeError, match=r"an empty list in tokenizer\.ggml\.merges"):
        FileSettings.of_file(path)
