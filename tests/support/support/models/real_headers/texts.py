"""Tries the text settings beside a header: sampling, ends, control tokens, chat templates.

No header has a vocabulary. A byte vocabulary stands in, with each token that the files name at its
id.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import tokenizers
from support.models.real_headers.trial import Outcome
from tokenizers import decoders, models, pre_tokenizers

from appliance.errors import ApplianceError
from appliance.model_files.sampling_defaults import RANGES
from appliance.tokenizer.chat_template import ChatTemplate
from appliance.tokenizer.from_folder import read_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from appliance.tokenizer.source import TokenizerSource

OF_TEXTS = ("generation_config.json", "tokenizer_config.json")
_FILES = (
    "config.json", *OF_TEXTS, "added_tokens.json", "special_tokens_map.json",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")
_ENDS = ("end", "eot", "eos", "eom", "im_end", "turn", "return", "call", "user", "observation")
_VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
_OPTIONS = {"datetime": "2026-11-28", "functions": "[]"}  # some template needs it
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Look up the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "its name"}},
                "required": ["city"],
            },
        },
    }
]
_CALL = {"name": "weather", "arguments": {"city": "Lyon"}}
_ASKED = [{"role": "user", "content": "Is it warm in Lyon?"}]
CHATS: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = [
    (_ASKED, None),
    ([{"role": "system", "content": "Be brief."}, *_ASKED], None),
    (
        [*_ASKED, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}],
        None,
    ),
    (_ASKED, TOOLS),
    (
        [
            {"role": "system", "content": "Be brief."},
            *_ASKED,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "call12345", "type": "function", "function": _CALL}],
            },
            {"role": "tool", "tool_call_id": "call12345", "name": "weather", "content": "31"},
        ],
        TOOLS,
    ),
    ([{"role": "user", "content": [{"type": "text", "text": "Is it warm?"}]}], None),
    (
        [
            *_ASKED,
            {"role": "assistant", "content": "Yes.", "reasoning_content": "It is July."},
            {"role": "user", "content": "Why?"},
        ],
        None,
    ),
]


def try_texts(path: Path, folder: Path) -> Outcome:
    """Read a folder's settings as the server does, and compare with transformers."""
    for name in _FILES:
        if (path / name).is_file():
            shutil.copyfile(path / name, folder / name)
    _write_tokenizer(folder)
    try:
        source = read_folder(folder)
    except ApplianceError as error:
        return Outcome("refused", str(error))
    for problem in (*_of_generation(folder, source), *_of_tokens(folder, source)):
        return Outcome("wrong", problem)
    chats = "no template" if source.chat_template is None else f"{len(CHATS)} chats"
    return Outcome("ok", f"ends {list(source.eos_token_ids)}, {source.sampling}; {chats}")


def try_template(file: Path, _folder: Path) -> Outcome:
    """Render a template's chats, and compare with transformers."""
    theirs = _plain_tokenizer(file.read_text())
    try:
        ours = ChatTemplate(file.read_text(), _VARIABLES)
    except ApplianceError as error:
        return Outcome("refused", str(error))
    rendered = 0
    for chat, tools in CHATS:
        problem, is_text = _of_chat(ours, theirs, chat, tools)
        if problem:
            return Outcome("wrong", problem)
        rendered += is_text
    if not rendered:
        return Outcome("untried", "all chats are refused")
    return Outcome("ok", f"{rendered} chats, {len(CHATS) - rendered} refused by both")


def _of_chat(
    ours: ChatTemplate, theirs: Any, chat: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> tuple[str | None, bool]:
    """Return the difference, and whether there is a text."""
    try:
        wanted = theirs.apply_chat_template(
            chat, tools=tools, tokenize=False, add_generation_prompt=True, **_OPTIONS
        )
    except Exception as error:  # an error of the template's author, or of Jinja
        wanted = error
    try:
        found: str | Exception = ours.render(chat, tools=tools, options=_OPTIONS)
    except ApplianceError as error:
        found = error
    if isinstance(wanted, Exception) != isinstance(found, Exception):
        return f"a chat of {len(chat)} messages: {found!r:.150}, transformers {wanted!r:.150}", True
    if not isinstance(wanted, Exception) and wanted != found:
        return f"a chat of {len(chat)} messages: {found!r:.150}, transformers {wanted!r:.150}", True
    return None, not isinstance(wanted, Exception)


def _of_generation(folder: Path, source: TokenizerSource) -> Iterator[str]:
    """Compare sampling and ends with transformers' GenerationConfig."""
    import transformers

    if not (folder / "generation_config.json").is_file():
        return
    theirs = transformers.GenerationConfig.from_pretrained(folder)
    named = {name: getattr(theirs, name, None) for name in RANGES}
    if theirs.do_sample is False:
        named = {"temperature": 0.0, "repetition_penalty": named["repetition_penalty"]}
    wanted = {name: value for name, value in named.items() if value is not None}
    found = dict(source.sampling.values)
    if found != {name: float(f"{value:.6g}") for name, value in wanted.items()}:
        yield f"sampling {found}, and GenerationConfig has {wanted}"
    ends = theirs.eos_token_id
    ends = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
    if not ends <= set(source.eos_token_ids):
        yield f"ends {source.eos_token_ids}, and GenerationConfig has {sorted(ends)}"
    for token_id in set(source.eos_token_ids) - ends:
        content = source.backend.id_to_token(token_id) or ""
        is_own = token_id == source.backend.token_to_id(_content(folder, "eos_token") or "")
        if not is_own and not any(part in content.lower() for part in _ENDS):
            yield f"token {token_id} ({content!r}) ends answers, and no file says so"


def _of_tokens(folder: Path, source: TokenizerSource) -> Iterator[str]:
    """Compare control tokens, ids and chats with transformers' tokenizer of the same files."""
    import transformers

    if not (folder / "tokenizer_config.json").is_file():
        return
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    if source.bos_token_id != theirs.bos_token_id and theirs.bos_token_id is not None:
        yield f"BOS is {source.bos_token_id}, and transformers' is {theirs.bos_token_id}"
    if theirs.eos_token_id is not None and theirs.eos_token_id not in source.eos_token_ids:
        yield f"ends {source.eos_token_ids}, and transformers' is {theirs.eos_token_id}"
    control = [str(token) for token in theirs.added_tokens_decoder.values()][:40]
    for text in ("Grüße, 東京 \n\t 12", "a " + " b ".join(control) + " c", "".join(control)):
        wanted = theirs.encode(text, add_special_tokens=True)
        found = source.backend.encode(text).ids
        if found != wanted:
            yield f"ids of {text[:40]!r}: {found[:12]}, transformers' {wanted[:12]}"
    template = source.chat_template
    if template is None:
        if theirs.chat_template is not None:
            yield "a chat template that transformers reads is not read"
        return
    theirs.chat_template = template.source
    for chat, tools in CHATS:
        if tools is None or template.tool_source is None:
            problem, _ = _of_chat(template, theirs, chat, tools)
            if problem:
                yield problem


def _write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json: a byte vocabulary, and the other files' tokens at their ids."""
    tokens = _named_tokens(folder)
    alphabet = list(pre_tokenizers.ByteLevel.alphabet())
    free = (n for n in range(len(alphabet) + len(tokens) + 1) if n not in tokens.values())
    vocabulary = tokens | {letter: next(free) for letter in sorted(alphabet)}
    taken = set(vocabulary.values())
    vocabulary |= {f"\0{n}": n for n in range(max(taken)) if n not in taken}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(sorted(tokens, key=lambda content: tokens[content]))
    backend.save(str(folder / "tokenizer.json"))


def _named_tokens(folder: Path) -> dict[str, int]:
    config, model = _json(folder / "tokenizer_config.json"), _json(folder / "config.json")
    found = {
        entry["content"]: int(token_id)
        for token_id, entry in (config.get("added_tokens_decoder") or {}).items()
    }
    found |= _json(folder / "added_tokens.json")
    for role in _ROLES:
        content, token_id = _content(folder, role), model.get(f"{role}_id")
        if content and isinstance(token_id, int) and token_id >= 0:
            found.setdefault(content, token_id)
    ids: dict[int, str] = {}
    for content, token_id in found.items():
        ids.setdefault(token_id, content)
    return {content: token_id for token_id, content in ids.items()}


def _content(folder: Path, role: str) -> str | None:
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        value = _json(folder / file).get(role)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            return value
    return None


def _json(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return found


def _plain_tokenizer(template: str) -> Any:
    import transformers

    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template, **_VARIABLES
    )
