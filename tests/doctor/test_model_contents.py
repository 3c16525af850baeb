"""A report on a model names everything unusual in it at once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.echo.byte_tokenizer import save_byte_tokenizer
from support.gguf.gguf_files import with_tokenizer, write_gguf_file
from support.gguf.picture_files import write_picture_files
from support.models.causal_models import random_model
from support.models.towers import TOWER_CASES, with_tower
from transformers import LlamaConfig
from typer.testing import CliRunner

from appliance.cli import app
from appliance.doctor.examination import scope_of
from appliance.doctor.finding import Finding, Grade
from appliance.doctor.model_contents import check_texts, check_weights

Report = Callable[[Path], list[Finding]]


@pytest.fixture
def report() -> Report:
    def run(path: Path) -> list[Finding]:
        scope = scope_of(model=str(path))
        return [*check_weights(scope), *check_texts(scope)]

    return run


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    path = tmp_path / "model"
    shutil.copytree(tiny_llama, path)
    save_byte_tokenizer(path)
    return path


def change(folder: Path, *left_out: str, **values: Any) -> None:
    file = folder / "config.json"
    settings = json.loads(file.read_text()) | values
    for key in left_out:
        settings.pop(key, None)
    file.write_text(json.dumps(settings))


def found(findings: list[Finding], grade: Grade) -> str:
    return "\n".join(f"{one.name}: {one.found}" for one in findings if one.grade is grade)


def test_a_sound_folder_has_nothing_to_mend(folder: Path, report: Report) -> None:
    findings = report(folder)
    assert {one.grade for one in findings if one.name != "chat template"} == {Grade.OK}
    words = found(findings, Grade.OK)
    assert "family: llama, described here; 2 layers" in words
    assert "'<|im_end|>'" in words
    assert "takes a system message" in words


def test_pictures_of_a_gguf_model_and_what_is_missing_for_them(
    tmp_path: Path, report: Report
) -> None:
    settings = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    path = write_picture_files(tmp_path, with_tower(TOWER_CASES["qwen3_vl"]), settings)
    with_tokenizer(path, 128)
    assert "pictures: read; " in found(report(path), Grade.OK)
    (tmp_path / "mmproj-F32.gguf").unlink()
    words = found(report(path), Grade.WARN)
    assert "pictures: pictures are not read" in words
    assert "no projector file is beside model.gguf" in words


def test_tensors_of_a_tower_are_left_out_only_where_pictures_are(tmp_path: Path) -> None:
    with_tower(TOWER_CASES["qwen3_vl"]).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16})
    )
    scope = scope_of(model=str(tmp_path))
    words = found([*check_weights(scope)], Grade.OK)
    assert "pictures: read; " in words
    assert "left out" not in words
    texts = replace(scope, engine=msgspec.structs.replace(scope.engine, images=False))
    count = sum(".visual." in name for name in load_file(tmp_path / "model.safetensors"))
    words = found([*check_weights(texts)], Grade.OK)
    assert "pictures: " not in words
    assert f"note: text only: {count} tensors of other parts" in words


def test_settings_that_are_assumed_or_without_effect(folder: Path, report: Report) -> None:
    change(folder, "rms_norm_eps", "hidden_act", use_flash=True)
    words = found(report(folder), Grade.OK)
    usual: Any = LlamaConfig()
    assert f"rms_norm_eps = {usual.rms_norm_eps!r}" in words
    assert f"hidden_act = {usual.hidden_act!r}" in words
    assert "no effect: use_flash = True" in words


def test_every_refused_setting_is_named(folder: Path, report: Report) -> None:
    change(
        folder,
        hidden_act="situ",
        num_key_value_heads=3,
        max_position_embeddings="long",
        rope_scaling={"rope_type": "odd"},
    )
    words = found(report(folder), Grade.FAIL)
    for one in ("'situ'", "num_key_value_heads = 3", "'long'", "'odd'"):
        assert words.count(one) == 1, words


@pytest.mark.parametrize("kind", [["llama"], {"a": 1}, 7, None])
def test_a_model_type_that_is_no_text_is_not_a_crash(
    kind: object, folder: Path, report: Report
) -> None:
    change(folder, model_type=kind)
    assert "2 layers" in found(report(folder), Grade.OK)


def test_every_wrong_tensor_is_named(folder: Path, report: Report) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.gate_up.weight"] = torch.ones(2, 2)
    tensors["model.norm.weight"] = torch.ones(3)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    words = found(report(folder), Grade.FAIL)
    assert "model.layers.1.self_attn.k_proj.weight is missing" in words
    assert "model.norm.weight has shape (3,)" in words
    assert "model.layers.0.mlp.gate_up.weight has no place" in words


def test_a_missing_tensor_of_transformers_modules_is_named(tmp_path: Path, report: Report) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    random_model("helium", vocab_size=300, **sizes, **heads).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    save_byte_tokenizer(tmp_path)
    words = found(report(tmp_path), Grade.FAIL)
    assert "model.layers.1.mlp.down_proj.weight is missing" in words


def test_a_head_of_other_values_is_noted(folder: Path, report: Report) -> None:
    change(folder, tie_word_embeddings=True)
    assert "the head of the file is kept" in found(report(folder), Grade.WARN)


def test_templates_that_leave_something_out(folder: Path, report: Report) -> None:
    save_byte_tokenizer(
        folder,
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    words = found(report(folder), Grade.WARN)
    assert "refuses a system message: no system here" in words
    assert "leaves out tools" in words
    assert "leaves out calls and results" in words
    assert "leaves out a chat" not in words


def test_more_tokens_than_the_model_embeds(folder: Path, report: Report) -> None:
    save_byte_tokenizer(folder, special=[f"<more{n}>" for n in range(300)])
    assert "the tokenizer has 572 tokens, the model's embedding 512" in found(
        report(folder), Grade.WARN
    )


def test_a_gguf_file(tmp_path: Path, report: Report) -> None:
    sizes = {
        "block_count": 1, "context_length": 64, "embedding_length": 32,
        "feed_forward_length": 48, "attention.head_count": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.clamp_kqv": 3.0, "attention.max_alibi_bias": 8.0,
    }  # fmt: skip
    tensors = {"token_embd.weight": torch.ones(40, 32), "blk.0.odd.weight": torch.ones(4, 4)}
    words = found(report(write_gguf_file(tmp_path / "m.gguf", "llama", sizes, tensors)), Grade.FAIL)
    assert "attention.clamp_kqv = 3.0" in words
    assert "attention.max_alibi_bias = 8.0" in words
    assert "holds no tokenizer" in words


def test_a_folder_without_weights_is_described_by_its_settings(
    folder: Path, report: Report
) -> None:
    (folder / "model.safetensors").unlink()
    change(folder, "rms_norm_eps")
    findings = report(folder)
    assert "holds no weights" in found(findings, Grade.FAIL)
    words = found(findings, Grade.OK)
    assert "family: llama, described here; 2 layers" in words
    assert "rms_norm_eps = 1e-06" in words
    assert "tokens; a text begins" in words
    change(folder, hidden_act="situ")
    assert "hidden_act = 'situ'" in found(report(folder), Grade.FAIL)


@pytest.mark.parametrize(
    ("name", "content", "words", "fix"),
    [
        ("adapter_config.json", '{"base_model_name_or_path": "org/base"}', "an adapter of org/base",
         "give that model, and the adapter with --lora"),
        ("params.json", '{"dim": 64}', "as its makers train it", "give the folder of the same"),
        ("model_index.json", "{}", "a pipeline of diffusers", "give a language model"),
        ("config.json", "version https://git-lfs.github.com/spec/v1", "a Git LFS pointer",
         "fetch the file with `git lfs pull`"),
        ("config.json", "<!DOCTYPE html>", "a web page", "download it again"),
        ("config.json", "[1]", "must hold a JSON object", "download it again"),
        ("model.safetensors", "version https://git-lfs.github.com/spec/v1", "a Git LFS pointer",
         "fetch the file with `git lfs pull`"),
    ],
)  # fmt: skip
def test_files_of_another_kind_are_named_with_what_helps(
    name: str, content: str, words: str, fix: str, folder: Path, report: Report
) -> None:
    if name not in ("config.json", "model.safetensors"):
        (folder / "config.json").unlink()
    (folder / name).write_text(content)
    failed = [one for one in report(folder) if one.name == "model" and one.grade is Grade.FAIL]
    assert len(failed) == 1
    assert words in failed[0].found
    assert fix in failed[0].fix


def test_a_pointer_in_place_of_the_tokenizer_is_named(folder: Path, report: Report) -> None:
    (folder / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    failed = [one for one in report(folder) if one.grade is Grade.FAIL]
    assert [(one.name, one.fix) for one in failed] == [
        ("tokens", "fetch the file with `git lfs pull`")
    ]


def test_a_path_that_is_no_model_is_not_to_be_fetched(tmp_path: Path, report: Report) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for path in (tmp_path / "notes.txt", tmp_path):
        (finding,) = report(path)
        assert "is no" in finding.found
        assert "give a" in finding.fix
        assert "pull" not in finding.fix


@pytest.mark.parametrize(
    ("kind", "architecture", "words"),
    [
        (gguf.GGUFType.ADAPTER, "llama", "an adapter"),
        (gguf.GGUFType.IMATRIX, "llama", "an importance matrix"),
        (gguf.GGUFType.MMPROJ, "clip", "a projector file, with which"),
        (gguf.GGUFType.MODEL, "controlvector", "a control vector"),
    ],
)
def test_gguf_files_that_are_no_models_are_named(
    kind: str, architecture: str, words: str, tmp_path: Path, report: Report
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", architecture)
    writer.add_type(kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert words in found(report(tmp_path / "m.gguf"), Grade.FAIL)


def test_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, ["doctor", str(folder)])
    assert result.exit_code == 0, result.output
    assert "tensors in place" in result.stdout
    assert "server" not in result.stdout
    change(folder, hidden_act="situ")
    result = CliRunner().invoke(app, ["doctor", str(folder), "--report"])
    assert result.exit_code == 1
    assert (
        "| fail | model | config.json: hidden_act = 'situ' is not supported; supp" in result.stdout
    )
    assert "leave out" in str(CliRunner().invoke(app, ["doctor", str(folder), "--quick"]).exception)
