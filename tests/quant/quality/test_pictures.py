"""The loss of texts behind pictures is transformers'."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from PIL import Image
from support.models.picture_models import PICTURE_MODELS, write_picture_model
from support.models.towers import TOWER_CASES
from support.runs.fetched import pictures
from transformers import AutoModelForImageTextToText, AutoTokenizer

from appliance.errors import QuantizeError
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.quality.card import PictureLoss
from appliance.quant.quality.card_rows import pictures_in_words
from appliance.quant.quality.pictures import compare_pictures, pictures_in
from appliance.quant.run.options import QuantizeOptions
from appliance.quant.run.pipeline import quantize_model
from appliance.quant.text.answerer import QUESTION

NAME = "qwen3_vl"
TEXTS = {"cat": "A cat looks up.", "cup": "A cup of coffee stands on a table."}


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two pictures with texts."""
    folder = tmp_path_factory.mktemp("pictures")
    for name, file in (("cat", "chelsea.png"), ("cup", "coffee.png")):
        image = Image.open(pictures() / file).convert("RGB").resize((120, 90))
        image.save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(TEXTS[name] + "\n")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = TOWER_CASES[NAME]
    wide = case.vision | {"hidden_size": 64, "intermediate_size": 96}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TOWER_CASES, NAME, replace(case, vision=wide))
        return write_picture_model(NAME, tmp_path_factory.mktemp("model") / "model")


def loss_of(folder: Path, picture: Path, text: str) -> tuple[float, int]:
    """The mean loss of a text's tokens behind a picture, by transformers, and their number."""
    found = PICTURE_MODELS[NAME]
    settings = {**found.processor}
    made = getattr(transformers, f"{settings.pop('image_processor_type')}Pil")(**settings)(
        images=[Image.open(picture)], return_tensors="pt"
    )
    rows = int(made["image_grid_thw"][0].prod()) // 4
    tokenizer = AutoTokenizer.from_pretrained(folder)
    before = (
        f"<|im_start|>user {found.shown.format(found.row * rows)}{QUESTION}"
        "<|im_end|><|im_start|>assistant "
    )
    ids = tokenizer(before + text, return_tensors="pt")["input_ids"]
    # The words that the template writes before an answer are part of what is said.
    start = len(tokenizer(before.removesuffix("assistant "))["input_ids"])
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    model.config.image_token_id = tokenizer.convert_tokens_to_ids(found.row)
    made["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    with torch.no_grad():
        scores = model(input_ids=ids, **made).logits[0].log_softmax(-1)
    losses = [-float(scores[place - 1, ids[0, place]]) for place in range(start, ids.shape[1])]
    return sum(losses) / len(losses), len(losses)


def test_losses_are_those_of_transformers(folder: Path, shown: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantize_model(folder, out, QuantizeOptions(WeightScheme(4, 32), tower_bits=8))
    found = compare_pictures(out, folder, shown)
    assert not found.reason
    wanted = [loss_of(folder, shown / f"{name}.png", TEXTS[name]) for name in TEXTS]
    assert (found.pictures, found.written) == (2, 0)
    assert found.tokens == sum(count for _, count in wanted)
    assert found.base.value == pytest.approx(sum(loss for loss, _ in wanted) / 2, abs=5e-3)
    assert found.base.error == pytest.approx(abs(wanted[0][0] - wanted[1][0]) / 2, abs=5e-3)
    assert found.change.value != 0
    assert 5 < found.same_top_percent.value < 100
    assert "tokens of 2 texts; as served" in pictures_in_words(found)


def test_a_model_loses_nothing_against_itself(folder: Path, shown: Path, tmp_path: Path) -> None:
    """Texts that are missing are written by the base."""
    Image.open(shown / "cat.png").save(tmp_path / "cat.png")
    found = compare_pictures(folder, folder, tmp_path)
    assert (found.pictures, found.written, found.reason) == (1, 1, "")
    assert (found.change.value, found.same_top_percent.value) == (0.0, 100.0)
    assert ", 1 written by the base;" in pictures_in_words(found)


def test_a_model_of_texts_says_that_it_is_one(
    folder: Path, shown: Path, smollm2_gguf: Path
) -> None:
    found = compare_pictures(smollm2_gguf, smollm2_gguf, shown)
    assert found == PictureLoss(0, reason=f"{smollm2_gguf.name} reads no pictures here")
    assert pictures_in_words(found) == f"not shown: {found.reason}"


def test_a_folder_without_pictures_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cat.txt").write_text("A cat.")
    with pytest.raises(QuantizeError, match=r"has no picture \(\.png"):
        pictures_in(tmp_path)
    with pytest.raises(QuantizeError, match="cannot be read"):
        pictures_in(tmp_path / "nothing")
    Image.new("RGB", (8, 8)).save(tmp_path / "cat.png")
    (tmp_path / "cat.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(QuantizeError, match="cannot be read"):
        pictures_in(tmp_path)
