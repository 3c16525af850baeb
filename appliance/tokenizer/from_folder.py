"""Loads a tokenizer from a Hugging Face folder."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers

from appliance.errors import CheckpointError, ModelError
from appliance.retrieval_recipe import recipe_of_folder
from appliance.sampling_defaults import SamplingDefaults
from appliance.tokenizer.chat_template import ChatTemplate
from appliance.tokenizer.configured_tokens import ConfiguredTokens, optional_json
from appliance.tokenizer.pre_tokenizers import unknown_patterns
from appliance.tokenizer.source import TokenizerSource, new_separator, with_end_of_turn

logger = logging.getLogger(__name__)

MAX_TOKENIZER_BYTES = 128 * 2**20  # the largest in use have under 40 MiB

GENERATION = "generation_config.json"


def load_from_folder(path: Path) -> TokenizerSource:
    """Read tokenizer.json and the small files beside it.

    Raises:
        ModelError: tokenizer.json is missing or damaged, or its rules take too long.
        ChatTemplateError: the chat template is unusable.
    """
    patterns = unknown_patterns(_content_of(path))
    if not patterns:
        return read_folder(path)
    from appliance.tokenizer.isolation import IsolatedEncoder

    logger.info("%s splits texts by rules of its own, in a process with limits", path)
    encoder = IsolatedEncoder(path, new_separator())  # first, because reading may hang, too
    return replace(read_folder(path), encoder=encoder)


def read_folder(path: Path) -> TokenizerSource:
    """Read the folder in this process, even if its rules are unknown.

    Raises:
        ModelError: tokenizer.json is missing or damaged.
        ChatTemplateError: the chat template is unusable.
    """
    backend = _read_backend(path)
    tokens = ConfiguredTokens.read(path, backend)
    notes = tokens.apply_to(backend)
    generation = optional_json(path / GENERATION)
    named = [
        *_ids(generation.get("eos_token_id")),
        *_ids(optional_json(path / "config.json").get("eos_token_id")),
        _token_id(backend, tokens.contents.get("eos_token")),
    ]
    return TokenizerSource(
        backend=backend,
        bos_token_id=_token_id(backend, tokens.contents.get("bos_token")),
        eos_token_ids=with_end_of_turn(backend, named),
        chat_template=_chat_template(path, tokens),
        sampling=SamplingDefaults.read(generation, GENERATION),
        retrieval=recipe_of_folder(path),
        notes=tuple(notes),
    )


def _content_of(path: Path) -> bytes:
    file = path / "tokenizer.json"
    if not file.is_file():
        found = [name for name in ("tokenizer.model", "vocab.json") if (path / name).is_file()]
        hint = f"it has {found[0]}, from which transformers can make one" if found else ""
        raise ModelError(f"{path} has no tokenizer.json{f': {hint}' if hint else ''}; add it")
    if (size := file.stat().st_size) > MAX_TOKENIZER_BYTES:
        raise ModelError(f"{file} has {size >> 20} MiB, more than any tokenizer; download it again")
    return file.read_bytes()


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    content = _content_of(path)
    try:
        backend = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises nothing more specific
        file = path / "tokenizer.json"
        raise ModelError(f"{file} is damaged: {error}; download it again") from error
    # Either would silently change a prompt.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _chat_template(path: Path, tokens: ConfiguredTokens) -> ChatTemplate | None:
    """Find the templates as AutoTokenizer does: files come before the configuration."""
    entry = tokens.config.get("chat_template")
    if entry is None:  # where processors of images had theirs
        entry = optional_json(path / "chat_template.json").get("chat_template")
    named: dict[str, str] = {}
    if isinstance(entry, list):
        named = {item["name"]: item["template"] for item in entry if _is_named_template(item)}
    elif isinstance(entry, dict):
        named = {name: text for name, text in entry.items() if isinstance(text, str)}
    elif isinstance(entry, str):
        named = {"default": entry}
    file = path / "chat_template.jinja"
    if file.is_file():
        named = {"default": _read_template(file)}
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        named[file.name.removesuffix(".jinja")] = _read_template(file)
    if "default" not in named:
        return None
    return ChatTemplate(named["default"], tokens.contents, tool_source=named.get("tool_use"))


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {file}: {error}; download it again") from error


def _is_named_template(item: Any) -> bool:
    return (
        isinstance(item, dict)
        and isinstance(item.get("name"), str)
        and isinstance(item.get("template"), str)
    )


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [token_id for token_id in values if type(token_id) is int and token_id >= 0]


def _token_id(backend: tokenizers.Tokenizer, content: str | None) -> int | None:
    token_id: int | None = None if content is None else backend.token_to_id(content)
    return token_id
