from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from appliance.doctor.examination import scope_of
from appliance.doctor.finding import Check, Finding, Grade, Scope
from appliance.doctor.model_files import check_model
from appliance.quant.quality.card import card_path

Look = Callable[[Check, Scope], dict[str, Finding]]


def test_a_model_that_is_not_there_or_cannot_be(look: Look) -> None:
    assert look(check_model, scope_of())["model"].grade is Grade.UNKNOWN, "not fetched yet"
    assert look(check_model, scope_of(model="org/name"))["model"].grade is Grade.UNKNOWN
    found = look(check_model, scope_of(model="/nowhere"))["model"]
    assert (found.grade, "there is no model '/nowhere'" in found.found) == (Grade.FAIL, True)


def test_a_folder_that_is_whole_and_one_that_is_cut(
    look: Look, tiny_llama: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_llama, model)
    found = look(check_model, scope_of(model=str(model)))
    assert found["model"].grade is Grade.OK
    assert "21 tensors in place" in found["model"].found
    assert found["model hashes"].grade is Grade.UNKNOWN
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    found = look(check_model, scope_of(model=str(model)))
    assert (found["model"].grade, "its tensors end at" in found["model"].found) == (
        Grade.FAIL,
        True,
    )
    quick = look(check_model, scope_of(model=str(model), is_quick=True))["model"]
    assert quick.grade is Grade.UNKNOWN


def test_a_packaged_model_that_is_cut(look: Look, smollm2_gguf: Path, tmp_path: Path) -> None:
    models = tmp_path / "cache" / "models"
    models.mkdir(parents=True)
    with smollm2_gguf.open("rb") as file:
        (models / smollm2_gguf.name).write_bytes(file.read(20 << 20))
    found = look(check_model, scope_of())
    assert {found["model"].grade, found["model hashes"].grade} == {Grade.FAIL}
    assert "is damaged" in found["model hashes"].found
    assert "download it again" in found["model"].fix
    assert "fetch it again" in found["model hashes"].fix


def test_hashes_of_the_hub_cache(look: Look, tiny_llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "models--org--name"
    snapshot, blobs = folder / "snapshots" / "abc", folder / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    config = (tiny_llama / "config.json").read_bytes()
    weights = (tiny_llama / "model.safetensors").read_bytes()
    names = {
        "config.json": hashlib.sha1(b"blob %d\0" % len(config) + config).hexdigest(),
        "model.safetensors": hashlib.sha256(weights).hexdigest(),
    }
    for (name, digest), content in zip(names.items(), (config, weights), strict=True):
        (blobs / digest).write_bytes(content)
        (snapshot / name).symlink_to(blobs / digest)
    found = look(check_model, scope_of(model="org/name"))
    assert found["model hashes"].found.startswith("2 of 2 right")
    with (blobs / names["model.safetensors"]).open("r+b") as file:
        file.seek(-10, 2)
        file.write(b"x")
    found = look(check_model, scope_of(model="org/name"))
    assert found["model"].grade is Grade.OK, "headers do not show it"
    assert found["model hashes"].grade is Grade.FAIL


def test_a_card_that_cannot_be_read(look: Look, tiny_llama: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_llama, model)
    card_path(model).write_text("{}")
    assert look(check_model, scope_of(model=str(model)))["quality card"].grade is Grade.FAIL
