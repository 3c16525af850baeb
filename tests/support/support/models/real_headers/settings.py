"""Reduces headers to settings that we may commit: numbers, switches and names of types.

scripts/real_headers FOLDER... --reduce FILE
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from support.models.real_headers.header import Header
from support.models.real_headers.sizes import text_section, with_few_layers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_NAME = re.compile(r"[\w.:*/|^$()\\+-]{1,80}")
_NOT_SETTINGS = {
    "_name_or_path", "name_or_path", "transformers_version", "id2label", "label2id", "auto_map",
    "_attn_implementation", "attn_implementation", "_flash_attn_2_enabled",
    "producer", "task_specific_params", "custom_pipelines", "_commit_hash", "config_groups",
    # transformers' settings of generation, which every section once had.
    "add_cross_attention", "bad_words_ids", "begin_suppress_tokens", "chunk_size_feed_forward",
    "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty", "do_sample",
    "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "length_penalty",
    "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores",
    "prefix", "problem_type", "pruned_heads", "remove_invalid_values", "repetition_penalty",
    "return_dict", "return_dict_in_generate", "sep_token_id", "suppress_tokens", "temperature",
    "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p", "torchscript",
    "typical_p", "use_bfloat16",
}  # fmt: skip
_LAYER = re.compile(r"layers?\.(\d+)(?=\.|\*|$)")
_EXPERT = re.compile(r"experts\.(\d+)(?=\.|$)")


def write_settings(headers: Iterable[Header], file: Path) -> None:
    """Write the settings of each kind of header once, one per line."""
    kept: dict[str, str] = {}
    for header in headers:
        reduced_header = reduced(header)
        content = {"config": reduced_header.config}
        if reduced_header.beside:
            content["beside"] = reduced_header.beside
        kept.setdefault(_kind(reduced_header), f'"{header.name}": {json.dumps(content)}')
    lines = sorted(kept.values(), key=str.lower)
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def read_settings(file: Path) -> Iterator[Header]:
    """Read the headers of a file that `write_settings` wrote."""
    for name, content in json.loads(file.read_text()).items():
        yield Header(name, content["config"], content.get("beside", {}))


def reduced(header: Header) -> Header:
    """Return a header without texts, with few layers of the real widths."""
    config = _settings(with_few_layers(header.config))
    count = text_section(config).get("num_hidden_layers") or 12
    beside = {
        name: _of_layers(_settings(content), count)
        for name, content in header.beside.items()
        if name != "generation_config.json"
    }
    config = _of_layers(config, count)
    if "auto_map" in header.config:
        config["auto_map"] = {}
    return Header(header.name, config, beside)


def _kind(header: Header) -> str:
    """Return what equal headers share: family, form of weights and rotation."""
    text, form = text_section(header.config), header.quantization or {}
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    return json.dumps(
        [
            [section.get("model_type") for section in (header.config, text)],
            [form.get(key) for key in ("quant_method", "quant_algo", "format")],
            [text.get("use_qk_norm"), rope.get("rope_type", rope.get("type"))],
            list(header.beside),
        ]
    )


def _settings(value: dict[str, Any]) -> dict[str, Any]:
    found = {key: _setting(one) for key, one in value.items() if key not in _NOT_SETTINGS}
    if value.get("quant_method") == "compressed-tensors":  # ModelOpt repeats its settings there
        found["config_groups"] = value.get("config_groups")
    return {key: one for key, one in found.items() if one is not ...}


def _setting(value: Any) -> Any:
    match value:
        case dict():
            return _settings(value)
        case list():
            items = [_setting(one) for one in value]
            return ... if any(one is ... for one in items) else items
        case str():
            return value if _NAME.fullmatch(value) else ...
    return value


def _of_layers(value: dict[str, Any], count: int) -> dict[str, Any]:
    """Leave out entries about layers and experts that were cut off, at any depth."""

    def is_kept(name: Any) -> bool:
        layer, expert = _LAYER.search(str(name)), _EXPERT.search(str(name))
        return (layer is None or int(layer[1]) < count) and (expert is None or int(expert[1]) < 8)

    found: dict[str, Any] = {}
    for key, one in value.items():
        if not is_kept(key):
            continue
        if isinstance(one, dict):
            one = _of_layers(one, count)
        elif isinstance(one, list) and any(isinstance(item, str) for item in one):
            one = [item for item in one if is_kept(item)]
        found[key] = one
    return found
