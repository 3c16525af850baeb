"""A model folder becomes a quantized model folder, or there is one clear line and nothing else."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from appliance.engine.nouns.request import Pooling
from appliance.errors import ApplianceError, CheckpointError, ConfigError, QuantizeError
from appliance.kernels.arrays import dtype_name
from appliance.kernels.weights.packed import PackedWeight
from appliance.model.source import open_model
from appliance.model_files.checkpoint import SafetensorsFolder
from appliance.model_files.retrieval_recipe import recipe_of_folder
from appliance.progress.quantize_events import (
    Done,
    QuantizeEvent,
    RunEstimated,
    RunPlanned,
    Start,
    UnitFinished,
    Written,
)
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.methods.rtn import quantize
from appliance.quant.run import pipeline, writing
from appliance.quant.run.options import Method, QuantizeOptions
from appliance.quant.run.pipeline import quantize_model

MakeFolder = Callable[..., Path]
DOWN = "model.layers.1.mlp.down_proj.weight"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_result_is_the_model_rounded(
    make_llama: MakeFolder, tmp_path: Path, bits: int, symmetric: bool
) -> None:
    scheme = WeightScheme(bits, 32, symmetric)
    source = open_model(make_llama())
    quantize_model(source.path, tmp_path / "out", QuantizeOptions(scheme))
    result = open_model(tmp_path / "out")
    assert result.spec == source.spec
    for slot in source.slots():
        before, after = source.weights.load(slot.name), result.weights.load(slot.name)
        assert isinstance(before, torch.Tensor)
        if slot.is_linear:
            assert isinstance(after, PackedWeight)
            expected = quantize(before, scheme)
            assert torch.equal(after.codes, expected.codes)
            assert torch.equal(after.scale, expected.scale)
            assert torch.equal(after.offset, expected.offset)
        else:
            assert isinstance(after, torch.Tensor)
            assert after.dtype == torch.bfloat16
            assert torch.equal(after, before)


def test_a_width_that_no_group_divides_gets_a_smaller_group_or_none(
    make_llama: MakeFolder, tmp_path: Path
) -> None:
    source = make_llama(intermediate_size=72)
    report = quantize_model(source, tmp_path / "out", QuantizeOptions(WeightScheme(4, 64)))
    assert set(report.notes) == {
        "12 weights in groups of 32, not 64: 96 inputs do not divide by 64",
        "2 weights kept in 16 bits: 72 inputs do not divide by 32",
    }
    kept = [f"model.layers.{layer}.mlp.down_proj" for layer in (0, 1)]
    assert config_of(report.out)["quantization_config"]["ignore"] == ["lm_head", *kept]
    weights = open_model(report.out).weights
    assert isinstance(weights.load(DOWN), torch.Tensor)
    up = weights.load("model.layers.1.mlp.up_proj.weight")
    assert isinstance(up, PackedWeight)
    assert up.group_size == 32


def test_two_group_sizes_name_their_modules(make_llama: MakeFolder, tmp_path: Path) -> None:
    out = quantize_model(make_llama(), tmp_path / "out", QuantizeOptions(WeightScheme(4, 128))).out
    groups = config_of(out)["quantization_config"]["config_groups"].values()
    sizes = {group["weights"]["group_size"]: len(group["targets"]) for group in groups}
    assert sizes == {32: 12, 128: 2}
    down = open_model(out).weights.load(DOWN)
    assert isinstance(down, PackedWeight)
    assert down.group_size == 128


def test_the_report_counts_what_is_on_disk(make_llama: MakeFolder, tmp_path: Path) -> None:
    report = quantize_model(
        make_llama(), tmp_path / "out", QuantizeOptions(WeightScheme(4, 32, symmetric=True))
    )
    folder = SafetensorsFolder(report.out)
    stored = {name: folder.load(name) for name in folder.tensor_names()}
    assert report.weight_bytes == sum(tensor.nbytes for tensor in stored.values())
    linear = {n: t for n, t in stored.items() if "_proj" in n}
    assert report.quantized_bytes == sum(tensor.nbytes for tensor in linear.values())
    assert report.num_quantized == 14
    assert report.quantized_bits_per_weight == pytest.approx(4.5, abs=0.1)
    assert str(report.out) in report.summary()
    assert "14 weights of a llama model" in report.summary()


def test_tokenizer_files_come_along_and_pickles_do_not(
    make_llama: MakeFolder, tmp_path: Path
) -> None:
    source = make_llama()
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    (source / "modeling.py").write_text("import os")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    out = quantize_model(source, tmp_path / "out").out
    assert (out / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
    assert names(out) == [
        "additional_chat_templates",
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_what_is_said_of_vectors_comes_along(make_llama: MakeFolder, tmp_path: Path) -> None:
    source = make_llama()
    modules = [
        {"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (source / "modules.json").write_text(json.dumps(modules))
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken"}')
    out = quantize_model(source, tmp_path / "out").out
    recipe = recipe_of_folder(out)
    assert recipe == recipe_of_folder(source)
    assert recipe.embedding.pooling is Pooling.LAST


def test_a_tied_head_stays_tied(make_llama: MakeFolder, tmp_path: Path) -> None:
    out = quantize_model(make_llama(tie_word_embeddings=True), tmp_path / "out").out
    assert "lm_head.weight" not in SafetensorsFolder(out).tensor_names()
    assert open_model(out).spec.tied_head


def test_a_head_of_other_values_stays_beside_the_embedding(
    make_llama: MakeFolder, tmp_path: Path
) -> None:
    own = torch.randn(50, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    folder = make_llama(tie_word_embeddings=True, tensors={"lm_head.weight": own})
    report = quantize_model(folder, tmp_path / "out")
    assert torch.equal(SafetensorsFolder(report.out).load("lm_head.weight"), own)
    assert config_of(report.out)["tie_word_embeddings"] is False  # for programs that respect it
    assert any("lm_head.weight holds other values" in note for note in report.notes)


@pytest.mark.parametrize(
    ("source_dtype", "stored"),
    [
        ("float16", torch.float16),
        ("bfloat16", torch.bfloat16),
        ("float32", torch.bfloat16),
    ],
)
def test_what_is_not_quantized_has_16_bits(
    make_llama: MakeFolder, tmp_path: Path, source_dtype: str, stored: torch.dtype
) -> None:
    source = make_llama(torch_dtype=source_dtype)
    out = quantize_model(source, tmp_path / "out").out
    folder = SafetensorsFolder(out)
    assert folder.dtype("model.norm.weight") == dtype_name(stored)
    assert folder.dtype(DOWN + "_scale") == dtype_name(stored)
    assert f"torch.{config_of(out)['dtype']}" == str(stored)
    assert "torch_dtype" not in config_of(out)


def test_shards_hold_the_same_tensors_as_one_file(make_llama: MakeFolder, tmp_path: Path) -> None:
    source = make_llama()
    whole = quantize_model(source, tmp_path / "whole").out
    parts = quantize_model(source, tmp_path / "parts", QuantizeOptions(max_shard_bytes=20_000)).out
    assert len(list(parts.glob("model-*-of-*.safetensors"))) > 2
    one, many = SafetensorsFolder(whole), SafetensorsFolder(parts)
    assert sorted(one.tensor_names()) == sorted(many.tensor_names())
    for name in one.tensor_names():
        assert torch.equal(one.load(name), many.load(name))


def test_the_same_model_gives_the_same_bytes_however_it_is_cut(
    make_llama: MakeFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_llama(intermediate_size=320)
    first = quantize_model(source, tmp_path / "first").out
    monkeypatch.setattr(writing, "PIECE_ELEMENTS", 12_300)
    second = quantize_model(source, tmp_path / "second").out
    assert digests(first) == digests(second)


def test_events_count_units_and_bytes_up_to_the_total(
    make_llama: MakeFolder, tmp_path: Path
) -> None:
    events: list[QuantizeEvent] = []
    report = quantize_model(make_llama(), tmp_path / "out", on_event=events.append)
    estimated, start, plan, *units, written, done = events
    assert isinstance(estimated, RunEstimated)
    assert isinstance(start, Start)
    assert isinstance(plan, RunPlanned)
    assert sum(kind.nbytes for kind in plan.classes) == report.weight_bytes
    assert (start.units, start.units_done, start.weight_bytes) == (5, 0, report.weight_bytes)
    assert written == Written(weight_bytes=report.weight_bytes)
    assert isinstance(done, Done)
    assert done.bits_per_weight == report.bits_per_weight
    assert all(isinstance(unit, UnitFinished) for unit in units)
    counted = [unit for unit in units if isinstance(unit, UnitFinished)]
    assert [unit.name for unit in counted] == [
        "model.embed_tokens.weight", "layer 0", "layer 1", "model.norm.weight", "lm_head.weight"
    ]  # fmt: skip
    assert [unit.done for unit in counted] == [1, 2, 3, 4, 5]
    assert counted[-1].bytes_done == counted[-1].bytes_total == report.weight_bytes
    assert counted[-1].remaining_seconds == 0
    assert 0 < counted[0].ram <= counted[0].peak_ram <= report.peak_ram


class Refusal(NamedTuple):
    error: type[ApplianceError]
    message: str
    prepare: Callable[[Path, Path], object]  # source folder, out
    method: str = "rtn"


def spoil(source: Path, _: Path) -> None:
    file = source / "model.safetensors"
    os.truncate(file, file.stat().st_size - 10)


def mark_quantized(source: Path, _: Path) -> None:
    config = config_of(source) | {"quantization_config": {"quant_method": "awq"}}
    (source / "config.json").write_text(json.dumps(config))


REFUSALS = {
    "an unknown method": Refusal(ConfigError, "supported: rtn, awq", lambda s, o: None, "aqlm"),
    "a destination that exists": Refusal(
        QuantizeError, "add --overwrite", lambda s, o: shutil.copytree(s, o)
    ),
    "a cut file": Refusal(CheckpointError, "model.safetensors", spoil),
    "no model": Refusal(CheckpointError, "config.json", lambda s, o: (s / "config.json").unlink()),
    "a quantized model": Refusal(QuantizeError, "quantized already, with 'awq'", mark_quantized),
    "a destination below a file": Refusal(
        QuantizeError, "cannot write", lambda s, o: o.parent.write_text("x")
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_are_one_line_and_leave_nothing(
    make_llama: MakeFolder, tmp_path: Path, case: str
) -> None:
    refusal = REFUSALS[case]
    source, out = make_llama(), tmp_path / "place" / "out"
    refusal.prepare(source, out)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(refusal.error, match=refusal.message) as caught:
        quantize_model(source, out, QuantizeOptions(method=Method.parse(refusal.method)))
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_link_is_what_its_own_name_says(tmp_path: Path) -> None:
    # As in a hub's cache, where model.gguf is a link to a file named by its hash.
    (tmp_path / "0a1b2c").write_bytes(b"GGUF")
    (tmp_path / "model.gguf").symlink_to(tmp_path / "0a1b2c")
    with pytest.raises(CheckpointError, match=r"model\.gguf") as caught:
        quantize_model(tmp_path / "model.gguf", tmp_path / "out")
    assert "neither a .gguf file" not in str(caught.value)


@pytest.mark.parametrize("name", [DOWN, "model.norm.weight"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_weight_that_is_not_finite_is_named(
    make_llama: MakeFolder, tmp_path: Path, name: str, value: float
) -> None:
    shape = (96, 128) if name == DOWN else (96,)
    weight = torch.zeros(shape, dtype=torch.bfloat16)
    weight[-1] = value
    source = make_llama(tensors={name: weight})
    with pytest.raises(QuantizeError, match=f"{name} holds NaN or infinity"):
        quantize_model(source, tmp_path / "out")
    assert names(tmp_path) == ["source"]


def test_a_model_without_a_width_to_divide_is_refused(
    make_llama: MakeFolder, tmp_path: Path
) -> None:
    source = make_llama(hidden_size=24, intermediate_size=40, head_dim=8)
    with pytest.raises(QuantizeError, match="nothing to quantize"):
        quantize_model(source, tmp_path / "out")
    assert names(tmp_path) == ["source"]


def test_too_little_space_is_seen_beforehand(
    make_llama: MakeFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(shutil.disk_usage(tmp_path))(total=100, used=90, free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(QuantizeError, match="MiB free; make room"):
        quantize_model(make_llama(), tmp_path / "out")
    assert names(tmp_path) == ["source"]


def test_a_disk_that_fills_up_at_the_end_keeps_the_older_result_and_the_work(
    make_llama: MakeFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_llama()
    out = quantize_model(source, tmp_path / "out").out
    before = digests(out)

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    eight = QuantizeOptions(WeightScheme(8), overwrite=True)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "flush", full)
        with pytest.raises(QuantizeError, match=r"No space left on device; 5 finished parts"):
            quantize_model(source, out, eight)
    assert digests(out) == before
    events: list[QuantizeEvent] = []
    quantize_model(source, out, eight, events.append)
    assert not [event for event in events if isinstance(event, UnitFinished)], (
        "nothing is done twice"
    )
    down = open_model(out).weights.load(DOWN)
    assert isinstance(down, PackedWeight)
    assert down.bits == 8
    assert names(tmp_path) == ["out", "source"]


def test_overwriting_replaces_the_whole_folder(make_llama: MakeFolder, tmp_path: Path) -> None:
    source = make_llama()
    out = quantize_model(source, tmp_path / "out", QuantizeOptions(max_shard_bytes=20_000)).out
    quantize_model(source, out, QuantizeOptions(WeightScheme(8), overwrite=True))
    assert "model.safetensors.index.json" not in names(out)
    down = open_model(out).weights.load(DOWN)
    assert isinstance(down, PackedWeight)
    assert down.bits == 8


def test_our_own_result_is_not_quantized_twice(make_llama: MakeFolder, tmp_path: Path) -> None:
    out = quantize_model(make_llama(), tmp_path / "out").out
    with pytest.raises(QuantizeError, match="quantized already, with 'compressed-tensors'"):
        quantize_model(out, tmp_path / "again")
