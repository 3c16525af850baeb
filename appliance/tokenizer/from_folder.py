"""Loads a tokenizer from a Hugging Face folder."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from appliance.errors import ChatTemplateError, CheckpointError, ModelError
from appliance.files import read_text, read_whole
from appliance.model_files.retrieval_recipe import recipe_of_folder
from appliance.model_files.sampling_defaults import SamplingDefaults
from appliance.tokenizer.chat_template import ChatTemplate
from appliance.tokenizer.configured_tokens import CONFIG, ConfiguredTokens, optional_json
from appliance.tokenizer.known_parts import unknown_parts
from appliance.tokenizer.source import TokenizerSource, new_separator, with_end_of_turn

logger = logging.getLogger(__name__)

MAX_TOKENIZER_BYTES = 128 * 2**20  # the largest in use have under 40 MiB

TOKENIZER, GENERATION = "tokenizer.json", "generation_config.json"


def load_from_folder(path: Path) -> TokenizerSource:
    """Read tokenizer.json, or older files in its place, and the small files beside it.

    Raises:
        ModelError: these files are missing or damaged, or their rules take too long.
        ChatTemplateError: the chat template is unusable.
    """
    unknown = unknown_parts(_content_of(path)) if (path / TOKENIZER).is_file() else []
    if not unknown:
        return read_folder(path)
    from appliance.tokenizer.isolation import IsolatedEncoder

    logger.info("%s is read in a process with limits, for its %s", path, ", ".join(unknown[:3]))
    encoder = IsolatedEncoder(path, new_separator())  # first, because reading may hang, too
    return replace(read_folder(path), encoder=encoder)


def read_folder(path: Path) -> TokenizerSource:
    """Read the folder in this process, even if its rules are unknown.

    Raises:
        ModelError: its files are missing or damaged.
        ChatTemplateError: the chat template is unusable.
    """
    model = optional_json(path / "config.json")
    older = None
    if not (path / TOKENIZER).is_file():
        from appliance.tokenizer.older_files import read_older_files

        older = read_older_files(path, optional_json(path / CONFIG), model.get("model_type", ""))
    backend = _read_backend(path) if older is None else older.backend
    tokens = ConfiguredTokens.read(path, backend, {} if older is None else older.roles)
    notes = tokens.apply_to(backend)
    if older is not None:
        _put_around(backend, tokens, usual_bos=older.add_bos)
    elif _is_of_gte(backend, tokens):
        _put_around(backend, tokens, usual_bos=False)
    split = tokens.split_special_tokens()
    if split:
        notes.append(
            f"{path / CONFIG} sets split_special_tokens: control tokens in texts and chats are "
            "plain text"
        )
    generation = optional_json(path / GENERATION)
    named = [
        *_ids(generation.get("eos_token_id")),
        *_ids(model.get("eos_token_id")),
        _token_id(backend, tokens.contents.get("eos_token")),
    ]
    return TokenizerSource(
        backend=backend,
        bos_token_id=_token_id(backend, tokens.contents.get("bos_token")),
        eos_token_ids=with_end_of_turn(backend, named),
        chat_template=_chat_template(path, tokens),
        sampling=SamplingDefaults.read(generation, GENERATION),
        retrieval=recipe_of_folder(path),
        split_special_tokens=split,
        notes=tuple(notes),
    )


def _content_of(path: Path) -> bytes:
    file = path / TOKENIZER
    if (size := file.stat().st_size) > MAX_TOKENIZER_BYTES:
        raise ModelError(f"{file} has {size >> 20} MiB, more than any tokenizer; download it again")
    return read_whole(file)


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    content = _content_of(path)
    try:
        backend = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises nothing more specific
        file = path / TOKENIZER
        raise ModelError(f"{file} is damaged: {error}; download it again") from error
    # Either would silently change a prompt.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _is_of_gte(backend: tokenizers.Tokenizer, tokens: ConfiguredTokens) -> bool:
    """Return True for gte-Qwen2's files, whose own class ends texts where tokenizer.json does not.

    vLLM reads them so, too (`_maybe_fix_gte_tokenizer`); their embedding is the state of that end.
    """
    named = tokens.config.get("auto_map")
    classes = named.get("AutoTokenizer") if isinstance(named, dict) else named
    own = isinstance(classes, list) and any(
        str(each).startswith("tokenization_qwen.") for each in classes
    )
    return own and isinstance(backend.post_processor, processors.ByteLevel)


def _put_around(
    backend: tokenizers.Tokenizer, tokens: ConfiguredTokens, *, usual_bos: bool
) -> None:
    """Put BOS and EOS around texts: without a tokenizer.json the configuration decides."""
    wanted = {
        "bos_token": tokens.config.get("add_bos_token", usual_bos),
        "eos_token": tokens.config.get("add_eos_token", False),
    }
    found = {
        role: (content, token_id)
        for role, add in wanted.items()
        if add is True
        and (content := tokens.contents.get(role)) is not None
        and (token_id := _token_id(backend, content)) is not None
    }
    before = [found["bos_token"][0]] if "bos_token" in found else []
    after = [found["eos_token"][0]] if "eos_token" in found else []
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after], special_tokens=list(dict.fromkeys(found.values()))
    )


def _chat_template(path: Path, tokens: ConfiguredTokens) -> ChatTemplate | None:
    """Find the templates as AutoTokenizer does: files come before the configuration."""
    file, entry = path / CONFIG, tokens.config.get("chat_template")
    if entry is None:  # where processors of images had theirs
        file = path / "chat_template.json"
        entry = optional_json(file).get("chat_template")
    named: dict[str, str] = {}
    if isinstance(entry, list) and all(map(_is_named_template, entry)):
        named = {item["name"]: item["template"] for item in entry}
    elif isinstance(entry, dict) and all(isinstance(text, str) for text in entry.values()):
        named = dict(entry)
    elif isinstance(entry, str):
        named = {"default": entry}
    elif entry is not None and not (path / "chat_template.jinja").is_file():
        raise ChatTemplateError(
            f"{file}: chat_template is {entry!r:.60}, which is neither a text nor a list of texts "
            "with names; correct it"
        )
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
        return read_text(file)
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
