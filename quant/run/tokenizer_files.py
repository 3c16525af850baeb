"""Copies tokenizer, chat template, processors and generation settings to the quantized model."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

from appliance.hub.packaged import packaged_sampling
from appliance.model_files.retrieval_recipe import MODULES, PROMPTS
from appliance.tokenizer.from_gguf import load_from_gguf

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.model_files.sampling_defaults import SamplingDefaults
    from appliance.tokenizer.source import TokenizerSource

# Files of tokenizers, processors, generation settings, retrieval and licence in folders.
_CARRIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tekken.json",
    "tiktoken.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    MODULES,
    PROMPTS,
    "sentence_bert_config.json",
    "1_Pooling/config.json",
    "1_LogitScore/config.json",
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "NOTICE",
)


def write_tokenizer_files(model_path: Path, folder: Path) -> None:
    """Copy a folder's tokenizer files, or convert a GGUF file's to Hugging Face's form.

    Raises:
        ModelError: the GGUF file's tokenizer is damaged or unknown.
    """
    if model_path.is_dir():
        templates = sorted(model_path.glob("additional_chat_templates/*.jinja"))
        for name in (*_CARRIED, *(str(file.relative_to(model_path)) for file in templates)):
            if (model_path / name).is_file():
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(model_path / name, folder / name)
        return
    source = load_from_gguf(model_path)
    (folder / "tokenizer.json").write_text(source.backend.to_str(), encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(source))
    sampling = source.sampling or packaged_sampling(model_path)
    _write_json(folder / "generation_config.json", _generation_config(source, sampling))


def _tokenizer_config(source: TokenizerSource) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    ids = {"bos_token": source.bos_token_id, "eos_token": next(iter(source.eos_token_ids), None)}
    for key, token_id in ids.items():
        if token_id is not None:
            config[key] = source.backend.id_to_token(token_id)
    template = source.chat_template
    if template is not None:
        config |= template.variables
        config["chat_template"] = (
            template.source
            if template.tool_source is None
            else [
                {"name": "default", "template": template.source},
                {"name": "tool_use", "template": template.tool_source},
            ]
        )
    return config


def _generation_config(source: TokenizerSource, sampling: SamplingDefaults) -> dict[str, Any]:
    config: dict[str, Any] = {"eos_token_id": list(source.eos_token_ids)}
    if source.bos_token_id is not None:
        config["bos_token_id"] = source.bos_token_id
    if sampling:
        config["do_sample"] = sampling.values.get("temperature") != 0  # or others ignore the rest
        config |= sampling.values
    return config


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
