"""Settings of a GGUF file that describe a Hugging Face tokenizer.

Keys are those of the GGUF specification (docs/gguf.md of the ggml project). The result is read back
and compared by `written_as_read`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from appliance.errors import QuantizeError
from appliance.quant.gguf.settings import FileSetting
from appliance.tokenizer import Tokenizer
from appliance.tokenizer.from_folder import load_from_folder
from appliance.tokenizer.from_gguf import BYTE_LEVEL, SENTENCEPIECE
from appliance.tokenizer.word_rules import UNNAMED, WORD_RULES
from gguf import TokenType

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from appliance.tokenizer.word_rules import WordRules

PREFIX = "tokenizer.ggml."


def vocabulary_of(folder: Path, vocab_size: int) -> list[FileSetting]:
    """Describe a folder's tokenizer.

    Args:
        vocab_size: rows of the embedding; ids without a token get a placeholder.

    Raises:
        ModelError: there is no tokenizer.json.
        QuantizeError: GGUF has no such tokenizer; the message names the part.
    """
    source = load_from_folder(folder)
    rules = json.loads(source.backend.to_str())
    model = rules["model"]
    if model["type"] != "BPE":
        raise refusal(folder, f"a {model['type']} model")
    is_bytes = not model.get("byte_fallback")
    if is_bytes and not model["merges"]:
        raise refusal(folder, "a vocabulary of bytes without merges")
    for content, index in _ids(rules):
        if index >= vocab_size:
            raise refusal(
                folder,
                f"a token {content!r} of id {index}, beyond the {vocab_size} rows of the embedding",
            )
    tokens, types = _tokens(rules, vocab_size, is_bytes=is_bytes)
    found: dict[str, Any] = {"model": BYTE_LEVEL if is_bytes else SENTENCEPIECE}
    if is_bytes:
        found["pre"] = _pre_tokenizer(folder, rules)
    else:
        found["pre"] = "default"
    found |= {"tokens": tokens, "token_type": types}
    if is_bytes:
        found["merges"] = [
            merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]
        ]
    else:
        found["scores"] = [-float(index) for index in range(len(tokens))]
        found["add_space_prefix"] = _adds_space(rules)
    found["add_bos_token"] = Tokenizer.from_path(folder).add_bos
    ids = {
        "bos_token_id": source.bos_token_id,
        "eos_token_id": next(iter(source.eos_token_ids), None),
        "unknown_token_id": _id_of(tokens, model.get("unk_token")),
    }
    found |= {key: value for key, value in ids.items() if value is not None}
    settings = [FileSetting.of(PREFIX + key, value) for key, value in found.items()]
    template = source.chat_template
    if template is not None:
        settings.append(FileSetting.of("tokenizer.chat_template", template.source))
        if template.tool_source is not None:
            settings.append(
                FileSetting.of("tokenizer.chat_template.tool_use", template.tool_source)
            )
    return settings


def refusal(folder: Path, what: str) -> QuantizeError:
    return QuantizeError(
        f"the tokenizer of {folder} has {what}, which is not written to GGUF files; use a GGUF"
        " file of the same model as the base, or --format compressed-tensors"
    )


def _ids(rules: dict[str, Any]) -> Iterator[tuple[str, int]]:
    yield from rules["model"]["vocab"].items()
    yield from ((token["content"], token["id"]) for token in rules["added_tokens"])


def _tokens(
    rules: dict[str, Any], vocab_size: int, *, is_bytes: bool
) -> tuple[list[str], list[int]]:
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [int(TokenType.UNUSED)] * vocab_size
    for content, index in rules["model"]["vocab"].items():
        tokens[index] = content
        is_byte = not is_bytes and len(content) == 6 and content.startswith("<0x")
        types[index] = TokenType.BYTE if is_byte else TokenType.NORMAL
    for token in rules["added_tokens"]:
        tokens[token["id"]] = token["content"]
        types[token["id"]] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
    unknown = _id_of(tokens, rules["model"].get("unk_token"))
    if unknown is not None and not is_bytes:
        types[unknown] = TokenType.UNKNOWN
    return tokens, [int(kind) for kind in types]


def _id_of(tokens: list[str], content: str | None) -> int | None:
    return tokens.index(content) if content in tokens else None


def _pre_tokenizer(folder: Path, rules: dict[str, Any]) -> str:
    """Return the name of the rules that split words as the folder's do."""
    wanted = _comparable(rules)
    for name, known in WORD_RULES.items():
        if name != UNNAMED and _comparable(_as_json(known)) == wanted:
            return name
    raise refusal(folder, "rules of its own to split words")


def _as_json(known: WordRules) -> dict[str, Any]:
    backend = Backend(BPE(ignore_merges=known.ignore_merges))
    backend.pre_tokenizer = known.pre_tokenizer()
    if known.normalizer is not None:
        backend.normalizer = known.normalizer()
    rules: dict[str, Any] = json.loads(backend.to_str())
    return rules


def _comparable(rules: dict[str, Any]) -> dict[str, Any]:
    """Return what decides the tokens: offsets do not, nor a sequence of one."""
    ignores = bool(rules["model"].get("ignore_merges"))
    return {
        "ignore_merges": ignores,
        "normalizer": list(_steps(rules["normalizer"], "normalizers")),
        "pre_tokenizer": list(_steps(rules["pre_tokenizer"], "pretokenizers")),
    }


def _steps(rule: dict[str, Any] | None, parts: str) -> Iterator[dict[str, Any]]:
    if rule is None:
        return
    if rule["type"] == "Sequence":
        for part in rule[parts]:
            yield from _steps(part, parts)
        return
    yield {key: value for key, value in rule.items() if key != "trim_offsets"}


def _adds_space(rules: dict[str, Any]) -> bool:
    normalizers = list(_steps(rules["normalizer"], "normalizers"))
    splitters = list(_steps(rules["pre_tokenizer"], "pretokenizers"))
    return any(step["type"] == "Prepend" for step in normalizers) or any(
        step["type"] == "Metaspace" and step.get("prepend_scheme") != "never" for step in splitters
    )
