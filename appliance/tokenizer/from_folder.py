"""Loads a tokenizer from a Hugging Face folder."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from appliance.errors import CheckpointError, ModelError
from appliance.files import read_json
from appliance.retrieval_recipe import recipe_of_folder
from appliance.sampling_defaults import SamplingDefaults
from appliance.tokenizer.chat_template import ChatTemplate
from appliance.tokenizer.pre_tokenizers import unknown_patterns
from appliance.tokenizer.source import TokenizerSource, new_separator, with_end_of_turn

logger = logging.getLogger(__name__)

MAX_TOKENIZER_BYTES = 128 * 2**20  # the largest in use have under 40 MiB

GENERATION = "generation_config.json"
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


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
    config = _optional_json(path / "tokenizer_config.json")
    role_map = _optional_json(path / "special_tokens_map.json") | config
    contents = {role: text for role in _ROLES if (text := _content(role_map.get(role)))}
    bos = _token_id(backend, contents.get("bos_token"))
    if config.get("add_bos_token") is True and bos is not None:
        _ensure_bos(backend, contents["bos_token"], bos)
    generation = _optional_json(path / GENERATION)
    named = [
        *_ids(generation.get("eos_token_id")),
        *_ids(_optional_json(path / "config.json").get("eos_token_id")),
        _token_id(backend, contents.get("eos_token")),
    ]
    return TokenizerSource(
        backend=backend,
        bos_token_id=bos,
        eos_token_ids=with_end_of_turn(backend, named),
        chat_template=_chat_template(path, config, contents),
        sampling=SamplingDefaults.read(generation, GENERATION),
        retrieval=recipe_of_folder(path),
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


def _ensure_bos(backend: tokenizers.Tokenizer, content: str, bos: int) -> None:
    if backend.encode("", add_special_tokens=True).ids[:1] != [bos]:
        backend.post_processor = processors.TemplateProcessing(
            single=[content, "$A"], special_tokens=[(content, bos)]
        )


def _chat_template(
    path: Path, config: dict[str, Any], variables: dict[str, str]
) -> ChatTemplate | None:
    file = path / "chat_template.jinja"
    entry = config.get("chat_template")
    named: dict[str, str] = {}
    if isinstance(entry, list):
        named = {item["name"]: item["template"] for item in entry if _is_named_template(item)}
    elif isinstance(entry, str):
        named = {"default": entry}
    if file.is_file():
        try:
            named["default"] = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"cannot read {file}: {error}; download it again") from error
    if "default" not in named:
        return None
    return ChatTemplate(named["default"], variables, tool_source=named.get("tool_use"))


def _is_named_template(item: Any) -> bool:
    return (
        isinstance(item, dict)
        and isinstance(item.get("name"), str)
        and isinstance(item.get("template"), str)
    )


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _content(value: Any) -> str | None:
    """Return a token's text from a string or an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [token_id for token_id in values if type(token_id) is int and token_id >= 0]


def _token_id(backend: tokenizers.Tokenizer, content: str | None) -> int | None:
    token_id: int | None = None if content is None else backend.token_to_id(content)
    return token_id
