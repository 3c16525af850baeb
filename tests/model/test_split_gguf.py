"""Models that gguf's own writer split over several files, against the same model in one file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from support.gguf.ggml_models import write_llama
from support.models.teacher_forcing import logits_of

from appliance import LLM, SamplingParams
from appliance.doctor import machine
from appliance.engine.load.kv_cache import kv_fingerprint
from appliance.engine.served_model import weights_digest
from appliance.errors import CheckpointError
from appliance.hub.resolve import resolve_model
from appliance.kernels.backend import REFERENCE
from appliance.model.loader import load_decoder
from appliance.model.source import open_model
from appliance.quant.gguf.tensors import FileSettings
from appliance.quant.quality.card import weights_fingerprint
from appliance.quant.quality.facts import stored_size
from appliance.quant.run.options import QuantizeOptions
from appliance.quant.run.pipeline import quantize_model

TYPES = ["Q4_0", "Q6_K", "Q8_0", "F16"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """A model in one file, and in parts."""
    folder = tmp_path_factory.mktemp("models")
    whole = write_llama(folder / "whole.gguf", TYPES)
    write_llama(folder / "big.gguf", TYPES, per_part=7)
    return whole, sorted(folder.glob("big-*.gguf"))


def test_the_same_model_is_read(files: tuple[Path, list[Path]]) -> None:
    whole, parts = files
    assert len(parts) == 5
    tokens = list(range(3, 20))
    found = []
    for path in (whole, parts[0], parts[3]):
        source = open_model(path)
        assert source.path in (whole, parts[0])
        decoder = load_decoder(source, REFERENCE, torch.device("cpu"), torch.float32)
        found.append(logits_of(decoder, tokens))
        assert stored_size(source) == stored_size(open_model(whole))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_it_answers_as_one_with_its_tokenizer(
    files: tuple[Path, list[Path]],
) -> None:
    answers = []
    for path in (files[0], files[1][0]):
        llm = LLM(model=str(path), max_model_len=64, threads=1)
        sampling = SamplingParams(temperature=0, max_tokens=8)
        answers.append(llm.generate("ab!cd", sampling, progress=False)[0].outputs[0].token_ids)
    assert answers[0] == answers[1]


def test_every_part_counts_where_the_model_is_told_from_others(
    files: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    first, *_, last = (Path(shutil.copy(part, tmp_path)) for part in files[1])
    precision: Any = type("Precision", (), {"block_size": 16, "kv_layers": ()})

    def told() -> tuple[bytes, ...]:
        found = kv_fingerprint(first, "x", precision, 64), weights_digest(first)
        return (*found, weights_fingerprint(first).encode())

    before = told()
    assert told() == before
    with last.open("r+b") as content:
        content.seek(-1, 2)
        content.write(b"\xff")
    after = told()
    assert all(one != other for one, other in zip(before, after, strict=True))


def test_it_is_a_base_of_a_file_and_its_settings_say_no_parts(
    files: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    whole, parts = files
    keys = [setting.key for setting in FileSettings.of_file(parts[0]).settings]
    assert keys == [setting.key for setting in FileSettings.of_file(whole).settings]
    options = QuantizeOptions.of_type("Q8_0")
    written = [
        quantize_model(path, tmp_path / path.stem, options).out for path in (whole, parts[0])
    ]
    one, other = (gguf.GGUFReader(path) for path in written)
    assert [t.data.tobytes() for t in one.tensors] == [t.data.tobytes() for t in other.tensors]


def test_a_missing_part_is_named_by_every_door(
    files: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    parts = [tmp_path / part.name for part in files[1]]
    for source, part in zip(files[1], parts, strict=True):
        shutil.copy(source, part)
    whole_size = sum(part.stat().st_size for part in parts)
    scope: Any = type("Scope", (), {"model": resolve_model(str(parts[2]), cache_dir=tmp_path)})
    assert machine.weight_bytes(scope) == whole_size
    parts[1].unlink()
    for path in (parts[0], parts[2]):
        with pytest.raises(CheckpointError, match=f"{parts[1].name} is missing.*4 of 5 files"):
            open_model(resolve_model(str(path), cache_dir=tmp_path).path)
    parts[0].unlink()
    with pytest.raises(CheckpointError, match=f"{parts[0].name} is missing.*3 of 5 files"):
        open_model(resolve_model(str(parts[2]), cache_dir=tmp_path).path)


def test_the_ending_may_be_in_capitals(files: tuple[Path, list[Path]], tmp_path: Path) -> None:
    for name in ("M.GGUF", "M.Gguf", "M"):  # without an extension, as Ollama stores its files
        path = tmp_path / name
        shutil.copy(files[0], path)
        found = resolve_model(str(path), cache_dir=tmp_path)
        assert found.name == "M"
        assert open_model(found.path).spec == open_model(files[0]).spec
    for part in files[1]:
        shutil.copy(part, tmp_path / part.name.replace(".gguf", ".GGUF"))
    path = tmp_path / files[1][2].name.replace(".gguf", ".GGUF")
    assert open_model(path).spec == open_model(files[0]).spec
