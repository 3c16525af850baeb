"""Folders of tiny models that read pictures, with tokenizer, chat template and processor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from support.models.towers import TOWER_CASES, with_tower

_PARTS = (
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
)
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ' ' }}"
    + _PARTS
    + "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


@dataclass(frozen=True, slots=True)
class PictureModel:
    """What a folder has beside the model of `TOWER_CASES`.

    Attributes:
        words: control tokens of pictures.
        image: what the template writes for one.
        processor: the content of preprocessor_config.json.
        merges: pairs of pieces that are a token, in the alphabet of bytes.
        ids: settings of the model, each with the control token whose id it is.
        row: the word that stands for a row.
        shown: what the processor writes for a picture, with {} for its rows; empty if it is more
            than words around them.
    """

    kind: str
    words: tuple[str, ...]
    image: str
    processor: dict[str, Any]
    merges: tuple[tuple[str, str], ...] = ()
    ids: dict[str, str] = field(default_factory=dict)
    row: str = ""
    shown: str = ""


_LINE = "\u010a"  # the end of a line in the alphabet of bytes
_QWEN_WORDS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
_QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
PICTURE_MODELS = {
    "glm4v": PictureModel(
        "glm4v",
        ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>"),
        "<|begin_of_image|><|image|><|end_of_image|>",
        {
            "image_processor_type": "Glm4vImageProcessor",
            "size": {"shortest_edge": 2 * 28 * 28, "longest_edge": 2 * 140 * 140},
        },
        row="<|image|>",
        shown="<|begin_of_image|>{}<|end_of_image|>",
    ),
    "internvl": PictureModel(
        "internvl",
        ("<img>", "<IMG_CONTEXT>", "</img>"),
        "<IMG_CONTEXT>",
        {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 56, "width": 56},
            "crop_to_patches": True,
            "max_patches": 4,
        },
        row="<IMG_CONTEXT>",
        shown="<img>{}</img>",
    ),
    "paddleocr_vl": PictureModel(
        "paddleocr_vl",
        ("<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>"),
        "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        {
            "image_processor_type": "PaddleOCRVLImageProcessor",
            "size": {"shortest_edge": 28 * 28, "longest_edge": 140 * 140},
        },
        row="<|IMAGE_PLACEHOLDER|>",
        shown="<|IMAGE_START|>{}<|IMAGE_END|>",
    ),
    "qwen2_5_vl": PictureModel(
        "qwen2_5_vl",
        _QWEN_WORDS,
        _QWEN_IMAGE,
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": 28 * 28, "longest_edge": 140 * 140},
        },
        row="<|image_pad|>",
        shown=_QWEN_IMAGE.replace("<|image_pad|>", "{}"),
    ),
    "qwen3_vl": PictureModel(
        "qwen3_vl",
        _QWEN_WORDS,
        _QWEN_IMAGE,
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": 16,
            "size": {"shortest_edge": 32 * 32, "longest_edge": 160 * 160},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
        row="<|image_pad|>",
        shown=_QWEN_IMAGE.replace("<|image_pad|>", "{}"),
    ),
    "gemma3": PictureModel(
        "gemma3",
        ("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
        "{{ '\\n' }}<start_of_image>",
        {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 56, "width": 56},
        },
        # As in Gemma's vocabulary, the longest run of line ends is a token.
        merges=((_LINE, _LINE), (_LINE * 2, _LINE)),
        ids={
            "boi_token_index": "<start_of_image>",
            "image_token_index": "<image_soft_token>",
            "eoi_token_index": "<end_of_image>",
        },
    ),
}


def write_picture_model(
    name: str,
    folder: Path,
    *,
    context: int = 512,
    merges: tuple[tuple[str, str], ...] = (),
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
    size: Mapping[str, int] | None = None,
) -> Path:
    """Write a model whose vocabulary is single bytes and its control tokens.

    Args:
        merges: more than those of the model, of which GGUF files must have some.
        text: other settings of its text than in `TOWER_CASES`.
        vision: of its tower.
        size: of its processor.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    found = PICTURE_MODELS[name]
    controls = ["<unk>", "<|im_start|>", "<|im_end|>", *found.words]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = (*found.merges, *merges)
    merged = ["".join(pair) for pair in merges]
    vocabulary = {word: place for place, word in enumerate((*controls, *letters, *merged))}
    raw = Tokenizer(models.BPE(vocabulary, [*merges]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        unk_token="<unk>",
        eos_token="<|im_end|>",
        extra_special_tokens=[*controls[1:]],
    )
    tokenizer.chat_template = _TEMPLATE.replace("IMAGE", found.image)
    tokenizer.save_pretrained(folder)
    case = TOWER_CASES[name]
    sizes = {"vocab_size": len(vocabulary), "max_position_embeddings": context}
    ids = {setting: vocabulary[word] for setting, word in found.ids.items()}
    case = replace(
        case,
        text={**case.text, **sizes, **(text or {})},
        vision={**case.vision, **(vision or {})},
        whole=case.whole | ids,
    )
    model = with_tower(case)
    model.save_pretrained(folder)
    processor = found.processor if size is None else found.processor | {"size": {**size}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder
