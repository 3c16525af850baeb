"""Doctor, fit and an engine agree on a model: all that serves it, or all reasons against it.

Both planners read headers. Numbers that are not finite are found when weights are loaded.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.echo.byte_tokenizer import save_byte_tokenizer
from support.gguf.encoder_gguf import write_encoder_gguf
from support.gguf.gguf_files import with_tokenizer, write_gguf_file
from support.models.causal_models import random_model
from support.models.encoder_models import make, make_decoder, make_judge, write_tokenizer
from support.models.fallback_models import FALLBACKS
from support.models.own_cache_models import sizes_of
from typer.testing import CliRunner

from appliance.cli import app
from appliance.config import EngineConfig
from appliance.doctor.examination import scope_of
from appliance.doctor.finding import Finding, Grade
from appliance.doctor.model_contents import check_texts, check_weights
from appliance.doctor.model_files import check_model
from appliance.engine.load.load_engine import load_engine
from appliance.errors import ApplianceError
from appliance.hub import find_model
from appliance.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 64,
    "attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip
POOLING = {
    "modules.json": [
        {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ],
    "1_Pooling/config.json": {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True},
}
# A refusal ends with what to do next.
ORDERS = {
    "add", "choose", "convert", "download", "fetch", "give", "leave", "load", "make", "merge",
    "rename", "save", "serve", "set", "take", "use", "write",
}  # fmt: skip


def decoder(folder: Path, model_type: str = "llama", **settings: Any) -> Path:
    folder.mkdir()
    random_model(model_type, **(settings or SIZES)).save_pretrained(folder)
    save_byte_tokenizer(folder)
    return folder


def with_files(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def changed(folder: Path, **settings: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    return with_files(folder, {"config.json": config | settings})


def encoder(folder: Path, *, ranks: bool = False, files: dict[str, Any] = POOLING) -> Path:
    folder.mkdir()
    made = make("bert", folder, ranks=ranks)
    write_tokenizer(made.path)
    return with_files(made.path, {} if ranks else files)


def fallback(folder: Path) -> Path:
    model_type, settings = FALLBACKS["helium"]
    return decoder(folder, model_type, **(settings | {"vocab_size": 300}))


def own_cache(folder: Path, model_type: str) -> Path:
    return decoder(folder, model_type, **(sizes_of(model_type) | {"vocab_size": 300}))


def headless(folder: Path) -> Path:
    folder.mkdir()
    path = make_decoder("qwen3-base", folder).path
    save_byte_tokenizer(path)
    return path


def judge(folder: Path) -> Path:
    folder.mkdir()
    make_judge("qwen3", folder)
    save_byte_tokenizer(folder)
    return folder


def gguf_file(folder: Path, architecture: str = "llama", **settings: Any) -> Path:
    folder.mkdir()
    norms = {f"blk.0.{name}_norm.weight": torch.ones(32) for name in ("attn", "ffn")}
    heads = {f"blk.0.attn_{name}.weight": torch.ones(32, 32) for name in ("q", "k", "v", "output")}
    tensors = {
        "token_embd.weight": torch.ones(40, 32), "output_norm.weight": torch.ones(32),
        "blk.0.ffn_gate.weight": torch.ones(64, 32), "blk.0.ffn_up.weight": torch.ones(64, 32),
        "blk.0.ffn_down.weight": torch.ones(32, 64), **norms, **heads,
    }  # fmt: skip
    file = write_gguf_file(folder / "m.gguf", architecture, LLAMA | settings, tensors)
    return with_tokenizer(file, 40)


def encoder_gguf(folder: Path) -> Path:
    return with_tokenizer(write_encoder_gguf(encoder(folder)), 97)


def projector(folder: Path) -> Path:
    folder.mkdir()
    writer = gguf.GGUFWriter(folder / "m.gguf", "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "m.gguf"


def linked(folder: Path, name: str) -> Path:
    (folder / name).unlink()
    (folder / name).symlink_to(folder / "nowhere")
    return folder


def adapter(folder: Path) -> Path:
    folder.mkdir()
    save_file({"a": torch.ones(2)}, folder / "adapter_model.safetensors")
    return with_files(folder, {"adapter_config.json": {"base_model_name_or_path": "org/base"}})


def without(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).unlink()
    return folder


def cut(folder: Path) -> Path:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return folder


def reshaped(folder: Path, name: str) -> Path:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: torch.ones(3)}, folder / "model.safetensors")
    return folder


SERVED: dict[str, Callable[[Path], Path]] = {
    "decoder": decoder,
    "fallback": fallback,
    "own cache": lambda path: own_cache(path, "bloom"),
    "own cache with buffers of the model's": lambda path: own_cache(path, "falcon_h1"),
    "encoder": encoder,
    "reranker": lambda path: encoder(path, ranks=True),
    "headless decoder": headless,
    "judging decoder": judge,
    "GGUF": gguf_file,
    "GGUF of an encoder": encoder_gguf,
}
POINTER = "version https://git-lfs.github.com/spec/v1\n"
REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "adapter": (adapter, "an adapter of org/base"),
    "projector": (projector, "a projector file, with which"),
    "pointer": (
        lambda path: with_files(decoder(path), {"model.safetensors": POINTER}),
        "Git LFS pointer",
    ),
    "web page": (lambda path: with_files(decoder(path), {"config.json": "<!DOCTYPE html>"}), "web"),
    "no weights": (lambda path: without(decoder(path), "model.safetensors"), "holds no weights"),
    "no weights of an encoder": (
        lambda path: without(encoder(path), "model.safetensors"),
        "holds no weights",
    ),
    "cut": (lambda path: cut(decoder(path)), "its tensors end at"),
    "cut encoder": (lambda path: cut(encoder(path)), "its tensors end at"),
    "shape": (lambda path: reshaped(decoder(path), "model.norm.weight"), r"has shape \(3,\)"),
    "shape of an encoder": (
        lambda path: reshaped(encoder(path), "embeddings.LayerNorm.weight"),
        r"has shape \(3,\)",
    ),
    "no place": (lambda path: reshaped(decoder(path), "model.odd.weight"), "has no place"),
    "no place in an encoder": (
        lambda path: reshaped(encoder(path), "encoder.odd.weight"),
        "has no place",
    ),
    "architecture": (
        lambda path: changed(decoder(path), architectures=["OddForCausalLM"], model_type="odd"),
        "OddForCausalLM is not supported",
    ),
    "GGUF architecture": (lambda path: gguf_file(path, "odd"), "'odd' is not supported"),
    "encoder that is not read": (
        lambda path: changed(encoder(path), model_type="deberta-v2"),
        "biases by relative position",
    ),
    "quantization": (
        lambda path: changed(decoder(path), quantization_config={"quant_method": "odd"}),
        "by 'odd'.* cannot be read",
    ),
    "quantized encoder": (
        lambda path: changed(encoder(path), quantization_config={"quant_method": "gptq"}),
        "quantization_config is not supported in an encoder",
    ),
    "setting": (lambda path: changed(decoder(path), hidden_act="situ"), "hidden_act = 'situ'"),
    "setting of an encoder": (
        lambda path: changed(encoder(path), hidden_act="situ"),
        "hidden_act = 'situ'",
    ),
    "no pooling": (lambda path: encoder(path, files={}), "without modules.json"),
    "classes": (
        lambda path: changed(encoder(path, ranks=True), id2label={"0": "a", "1": "b", "2": "c"}),
        "id2label has 3 labels",
    ),
    "link of weights to nowhere": (
        lambda path: linked(decoder(path), "model.safetensors"),
        "model.safetensors is a link to .*, which is not there",
    ),
    "link of settings to nowhere": (
        lambda path: linked(decoder(path), "config.json"),
        "config.json is a link to .*, which is not there",
    ),
    "nothing in the settings": (
        lambda path: with_files(decoder(path), {"config.json": {}}),
        "names neither an architecture nor a model_type",
    ),
    "no tokenizer": (lambda path: without(decoder(path), "tokenizer.json"), "no tokenizer"),
}


def says_doctor(path: Path) -> tuple[str, list[Finding]]:
    scope = scope_of(model=str(path))
    findings = [*check_weights(scope), *check_texts(scope)]
    failed = [one for one in findings if one.grade is Grade.FAIL]
    return "\n".join(f"{one.found}; {one.fix}" for one in failed), failed


def says_fit(path: Path) -> str:
    result = CliRunner().invoke(app, ["fit", str(path), "--no-speed"])
    assert result.exception is None or isinstance(result.exception, ApplianceError), result
    return str(result.exception or "")


def says_engine(path: Path) -> str:
    """Act like serve: find the model, load its engine, read its tokens."""
    try:
        found = find_model(str(path), cache_dir=path)
        assert found is not None
        config = EngineConfig(model=str(found.path), threads=1, max_num_seqs=2, device="cpu")
        load_engine(
            config, eos_token_ids=(), metadata=None, on_progress=lambda stage, done, total: None
        )
        Tokenizer.from_path(found.path).close()
    except ApplianceError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", SERVED)
def test_what_is_served_is_planned_and_found_sound(kind: str, tmp_path: Path) -> None:
    path = SERVED[kind](tmp_path / "model")
    assert says_engine(path) == ""
    assert says_doctor(path)[0] == ""
    assert says_fit(path) == ""
    assert {one.grade for one in check_model(scope_of(model=str(path)))} <= {
        Grade.OK,
        Grade.UNKNOWN,  # without hashes
    }


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused_is_refused_by_all_with_what_helps(kind: str, tmp_path: Path) -> None:
    make_it, words = REFUSED[kind]
    path = make_it(tmp_path / "model")
    said, failed = says_doctor(path)
    for refusal in (says_engine(path), says_fit(path), said):
        assert re.search(words, refusal), refusal
    assert "\n" not in says_engine(path)
    for one in failed:
        assert set(one.fix.replace("`", "").split()[:1]) <= ORDERS, one
        assert one.fix, one
