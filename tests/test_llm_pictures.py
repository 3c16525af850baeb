"""Pictures in scripts: every form that an image can have, and answers that are transformers'."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from support.gguf.gguf_files import with_vocabulary
from support.gguf.picture_files import write_picture_files
from support.gguf.projector_files import as_published
from support.models.picture_models import PICTURE_MODELS, write_picture_model
from support.models.towers import TOWER_CASES
from support.runs.fetched import pictures
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
)

from appliance import LLM, SamplingParams
from appliance.engine.nouns.messages import StepReport
from appliance.errors import ChatTemplateError, ImageError, RequestError
from appliance.pictures import of_image
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.run.options import Method, QuantizeOptions
from appliance.quant.run.pipeline import quantize_model
from appliance.stats import SequenceView

SAMPLING = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
QUESTION = "What is this?"
MARKS = "<|vision_start|><|image_pad|><|vision_end|>"


@contextmanager
def opened(folder: Path) -> Iterator[LLM]:
    llm = LLM(str(folder), device="cpu", dtype="float32", kv_cache_dtype="fp32", threads=1)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = write_picture_model("qwen3_vl", tmp_path_factory.mktemp("pictures") / "model")
    with opened(folder) as llm:
        yield llm


@pytest.fixture(scope="module")
def cat() -> Image.Image:
    return Image.open(pictures() / "chelsea.png").convert("RGB").resize((150, 100))


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def part(image: Any) -> dict[str, Any]:
    return {"type": "image", "image": image}


def asked(llm: LLM, *parts: dict[str, Any]) -> list[int]:
    content = [*parts, {"type": "text", "text": QUESTION}]
    (answer,) = llm.chat([{"role": "user", "content": content}], SAMPLING, progress=False)
    return answer.outputs[0].token_ids


def by_transformers(name: str, folder: Path, *images: Image.Image) -> list[int]:
    """The answer to the images and the question, in the form of the model's template."""
    found = PICTURE_MODELS[name]
    settings = {**found.processor}
    made = getattr(transformers, f"{settings.pop('image_processor_type')}Pil")(**settings)(
        images=[*images], return_tensors="pt"
    )
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    if "image_grid_thw" in made:
        rows = [int(grid.prod()) // 4 for grid in made["image_grid_thw"]]
    else:
        of_tile = model.model.get_image_features(made["pixel_values"]).pooler_output.shape[1]
        rows = [of_tile * int(tiles) for tiles in made.pop("num_patches")]
    marks = "".join(found.shown.format(found.row * count) for count in rows)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = f"<|im_start|>user {marks}{QUESTION}<|im_end|><|im_start|>"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    model.generation_config.eos_token_id = None
    model.config.image_token_id = tokenizer.convert_tokens_to_ids(found.row)
    if "image_grid_thw" in made:
        made["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    said = model.generate(ids, **made, max_new_tokens=8, do_sample=False, pad_token_id=0)
    answer: list[int] = said[0, ids.shape[1] :].tolist()
    return answer


@pytest.mark.parametrize("name", [name for name, one in PICTURE_MODELS.items() if one.shown])
def test_images_of_pillow_are_answered_as_transformers_answers(
    name: str, cat: Image.Image, tmp_path: Path
) -> None:
    folder = write_picture_model(name, tmp_path / "model")
    dog = cat.rotate(90, expand=True)
    with opened(folder) as llm:
        assert asked(llm, part(cat)) == by_transformers(name, folder, cat)
        assert asked(llm, part(dog), part(cat)) == by_transformers(name, folder, dog, cat)
    out = tmp_path / "quantized"
    quantize_model(folder, out, QuantizeOptions(WeightScheme(8, 32), Method.RTN))
    with opened(out) as llm:  # rounds activations to 8 bits, too, so that later tokens may differ
        found, wanted = asked(llm, part(dog), part(cat)), by_transformers(name, out, dog, cat)
        assert found[:3] == wanted[:3]


def test_views_tell_rows_of_pictures_and_who_waits_for_them(
    llm: LLM, cat: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, seen = llm.engine.step, list[SequenceView]()

    def watched() -> StepReport:
        seen.extend(llm.engine.sequences())
        return step()

    monkeypatch.setattr(llm.engine, "step", watched)
    processor = transformers.Qwen2VLImageProcessorPil(**PICTURE_MODELS["qwen3_vl"].processor)
    other = cat.rotate(180)
    grid = processor(images=[other], return_tensors="pt")["image_grid_thw"]
    for waits in (True, False):
        seen.clear()
        asked(llm, part(other))
        assert ("encoding" in {view.status for view in seen}) is waits, "then its rows are kept"
        assert seen[-1].status == "running"
        assert {view.picture_rows for view in seen} == {int(grid.prod()) // 4}
        assert len({(view.request_id, view.index, view.prompt_tokens) for view in seen}) == 1
    seen.clear()
    asked(llm)
    assert {view.picture_rows for view in seen} == {0}


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_gguf_files_are_answered_as_transformers_answers(
    name: str, cat: Image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TOWER_CASES, name, as_published(TOWER_CASES[name]))
    folder = write_picture_model(name, tmp_path / "model")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    usual = getattr(transformers, PICTURE_MODELS[name].processor["image_processor_type"] + "Pil")
    processor = usual(**PICTURE_MODELS[name].processor)
    settings = {"image_mean": [*processor.image_mean], "image_std": [*processor.image_std]}
    size = processor.size
    path = write_picture_files(
        tmp_path,
        model,
        settings,
        image_min_pixels=size["shortest_edge"],
        image_max_pixels=size["longest_edge"],
    )
    with_vocabulary(path, AutoTokenizer.from_pretrained(folder))
    dog = cat.rotate(90, expand=True)
    with opened(path) as llm:
        assert asked(llm, part(cat)) == by_transformers(name, folder, cat)
        assert asked(llm, part(dog), part(cat)) == by_transformers(name, folder, dog, cat)


def test_every_form_of_a_picture_is_the_same_picture(
    llm: LLM, cat: Image.Image, tmp_path: Path
) -> None:
    said = asked(llm, part(cat))
    data = file_of(cat)
    path = tmp_path / "cat.png"
    path.write_bytes(data)
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    for form in (data, path, str(path), url):
        assert asked(llm, part(form)) == said
    assert asked(llm, {"type": "image_url", "image_url": {"url": url}}) == said
    prompt = f"<|im_start|>user {MARKS}{QUESTION}<|im_end|><|im_start|>"
    given: dict[str, Any] = {"prompt": prompt, "multi_modal_data": {"image": cat}}
    answers = llm.generate([given, "no picture"], SAMPLING, progress=False)
    assert answers[0].outputs[0].token_ids == said
    assert answers[0].prompt == prompt
    ids = llm.tokenizer.encode(prompt, add_special_tokens=True)
    given = {"prompt_token_ids": ids, "multi_modal_data": {"image": [cat]}}
    (answer,) = llm.generate([given], SAMPLING, progress=False)
    assert answer.outputs[0].token_ids == said
    rows = len(answer.prompt_token_ids) - len(ids) + 1
    assert answer.prompt_token_ids.count(0) == rows > 1


@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "La", "P", "RGBA", "RGBa", "CMYK", "YCbCr", "HSV", "PA"]
)
def test_an_image_of_any_mode_keeps_what_it_shows(llm: LLM, cat: Image.Image, mode: str) -> None:
    straight = {"La": "LA", "RGBa": "RGBA"}.get(mode, mode)
    image = cat.convert(straight).convert(mode)
    assert asked(llm, part(image)) == asked(llm, part(image.convert(straight).convert("RGB")))


def test_an_image_is_upright_and_what_is_transparent_is_white(llm: LLM, cat: Image.Image) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # its top is at the right
    turned = Image.open(io.BytesIO(file_of(cat, "PNG", exif=exif)))
    assert asked(llm, part(turned)) == asked(llm, part(cat.rotate(-90, expand=True)))
    clear = cat.copy()
    clear.putalpha(0)
    assert asked(llm, part(clear)) == asked(llm, part(Image.new("RGB", cat.size, "white")))


def test_what_is_no_picture_is_refused_by_its_place(llm: LLM, cat: Image.Image) -> None:
    with pytest.raises(
        RequestError, match=r"messages\[0\].content\[0\] is a int; give a PIL image"
    ):
        asked(llm, part(3))
    with pytest.raises(RequestError, match=r"content\[0\]: /none.png cannot be read: No such"):
        asked(llm, part("/none.png"))
    closed = Image.open(io.BytesIO(file_of(cat)))
    closed.close()
    for broken in (Image.new("RGB", (0, 5)), closed):
        with pytest.raises(ImageError, match=r"content\[0\] is no picture that can be read"):
            asked(llm, part(broken))
    with pytest.raises(RequestError, match="32 bits for each value"):
        asked(llm, part(cat.convert("F")))
    with pytest.raises(ImageError, match=r"messages\[0\].content\[0\]: these bytes are no image"):
        asked(llm, part(b"nothing"))
    with pytest.raises(RequestError, match=r"content\[0\] is no part of a message"):
        asked(llm, {"type": "video", "video": "x"})
    given = {"prompt": "where?", "multi_modal_data": {"image": cat}}
    with pytest.raises(ChatTemplateError, match=r"0 placeholders <\|image_pad\|> for 1 pictures"):
        llm.generate([given], progress=False)
    with pytest.raises(RequestError, match="needs prompt or prompt_token_ids"):
        llm.generate([{"text": "x"}], progress=False)
    assert not llm.engine.has_work


def test_sixteen_bits_of_grey_are_cut_to_eight() -> None:
    from appliance.media.decode import decode

    image = Image.new("I;16", (4, 4), 0x1234)
    assert decode(of_image(image, "x").data).getpixel((0, 0)) == (0x12,) * 3


def test_words_around_a_picture_share_tokens_with_the_text(
    tmp_path: Path, cat: Image.Image
) -> None:
    """Gemma's processor puts blank lines into the text before that becomes tokens."""
    folder = write_picture_model("gemma3", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(
        folder,
        extra_special_tokens={
            "boi_token": "<start_of_image>",
            "image_token": "<image_soft_token>",
            "eoi_token": "<end_of_image>",
        },
    )
    images = Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
    processor = Gemma3Processor(images, tokenizer, image_seq_length=16)
    text = "<|im_start|>user " + 2 * "\n<start_of_image>" + f"{QUESTION}<|im_end|><|im_start|>"
    both = [cat, cat.rotate(90, expand=True)]
    made = processor(text=text, images=both, return_tensors="pt")
    model = Gemma3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    found = model.generate(**made, max_new_tokens=8, do_sample=False, pad_token_id=0)
    wanted = made["input_ids"][0].tolist()
    soft = tokenizer.convert_tokens_to_ids("<image_soft_token>")
    content = [*map(part, both), {"type": "text", "text": QUESTION}]
    given = {"prompt": text, "multi_modal_data": {"image": both}}
    with opened(folder) as llm:
        chat = llm.chat([{"role": "user", "content": content}], SAMPLING, progress=False)
        for (answer,) in (chat, llm.generate([given], SAMPLING, progress=False)):
            assert answer.prompt_token_ids == [0 if one == soft else one for one in wanted]
            assert answer.outputs[0].token_ids == found[0, len(wanted) :].tolist()
