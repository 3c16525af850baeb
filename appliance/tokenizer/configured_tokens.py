"""Tokens and space prefixes that only the files beside tokenizer.json name.

As AutoTokenizer of transformers 5.24 adds them; 4.57 does the same, but leaves out a list under
`extra_special_tokens` and roles of a model's own, such as `image_token`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers

from appliance.errors import CheckpointError
from appliance.files import read_json
from appliance.tokenizer.pieces import SPACE_MARK

CONFIG, SPECIAL_MAP, ADDED = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
_LLAMA = "LlamaTokenizer"
# In the order in which transformers gives ids to those that the vocabulary lacks.
_ROLES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_SWITCHES = ("add_bos_token", "add_eos_token")
# Defaults of transformers' classes, for roles that a folder does not name; its vocabulary must have
# the token.
CLASS_ROLES: dict[str, dict[str, str]] = {
    _LLAMA: {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "GemmaTokenizer": {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
    "GPTNeoXTokenizer": {
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|padding|>",
    },
    "CohereTokenizer": {
        "bos_token": "<BOS_TOKEN>",
        "eos_token": "<|END_OF_TURN_TOKEN|>",
        "unk_token": "<UNK>",
        "pad_token": "<PAD>",
        "cls_token": "<CLS>",
        "sep_token": "<SEP>",
        "mask_token": "<MASK_TOKEN>",
    },
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"),
}
# Of these the classes set the prefix of byte-level words.
_BYTE_LEVEL = ("GPT2Tokenizer", "GPTNeoXTokenizer", "CohereTokenizer", "Qwen2Tokenizer")


@dataclass(frozen=True, slots=True)
class ConfiguredTokens:
    """Tokens that the small files of a folder name.

    Attributes:
        config: tokenizer_config.json.
        roles: tokens by role, such as bos_token, also of a model's own.
        added: tokens by id.
        extra: control tokens without a role.
    """

    path: Path
    config: Mapping[str, Any]
    roles: Mapping[str, AddedToken] = field(default_factory=dict)
    added: Mapping[int, AddedToken] = field(default_factory=dict)
    extra: tuple[AddedToken, ...] = ()

    @property
    def contents(self) -> dict[str, str]:
        """The texts of the roles."""
        return {role: str(token.content) for role, token in self.roles.items()}

    @classmethod
    def read(
        cls, path: Path, backend: Tokenizer, usual_roles: Mapping[str, str]
    ) -> ConfiguredTokens:
        """Read them from a folder, for a tokenizer without them.

        Args:
            usual_roles: texts of roles that the files do not name.

        Raises:
            CheckpointError: a file is damaged; the message names it and the key.
        """
        config = optional_json(path / CONFIG)
        special_map = optional_json(path / SPECIAL_MAP)
        if "added_tokens_decoder" in config:
            special_map = {}  # the older file is read only without the newer key

        def file_of(key: str) -> Path:
            return path / (SPECIAL_MAP if key in special_map else CONFIG)

        named = _class_roles(config, backend) | {**usual_roles} | config | special_map
        roles = {}
        for key in (*_ROLES, *(key for key in named if key not in _ROLES)):
            value = named.get(key)
            if value is None or not key.endswith("_token") or key in _SWITCHES:
                continue
            token = (_needed if key in _ROLES else _special)(file_of(key), key, value)
            if token is not None:
                roles[key] = token
        extra: list[AddedToken] = []
        for file, key, values in _extras(path, config, special_map):
            if isinstance(values, dict):
                for role, value in values.items():
                    roles[role] = _needed(file, f"{key}: {role}", value)
            elif isinstance(values, list):
                extra += [_needed(file, key, value) for value in values]
            elif values is not None:
                raise _wrong(file, key, values)
        if "added_tokens_decoder" in config:
            added = dict(_decoder(path / CONFIG, config["added_tokens_decoder"]))
        else:
            special = {token.content for token in (*roles.values(), *extra)}
            added = dict(_added_file(path / ADDED, special))
        return cls(path, config, roles, added, tuple(extra))

    def split_special_tokens(self) -> bool:
        """Return True if control tokens in a text are plain text, as AutoTokenizer takes it.

        Raises:
            CheckpointError: the setting is neither true nor false.
        """
        value = self.config.get("split_special_tokens", False)
        if not isinstance(value, bool):
            raise _no_flag(self.path / CONFIG, "split_special_tokens", value)
        return value

    def apply_to(self, backend: Tokenizer) -> list[str]:
        """Add the tokens, and set how words begin; return notes for the user."""
        _set_space_prefix(backend, self.config, self.path / CONFIG)
        present: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        added = dict(self.added)
        if "added_tokens_decoder" not in self.config:
            added |= present
        same = {repr(token) for token in present.values()}
        new = [token for _, token in sorted(added.items()) if repr(token) not in same]
        known = {token.content for token in (*present.values(), *new)}
        by_content = {token.content: token for token in added.values()}
        for token in (*self.roles.values(), *self.extra):
            if token.content not in known:
                new.append(by_content.get(token.content, token))
                known.add(token.content)
        # The library never forgets that a token was special.
        special = {token.content for token in present.values() if token.special}
        special |= set(self.contents.values())
        for token in new:
            token.special = token.special or token.content in special
        backend.add_tokens(new)
        origin = self.path / (CONFIG if "added_tokens_decoder" in self.config else ADDED)
        return [
            f"{origin} gives {token.content!r} the id {token_id}, but the vocabulary "
            f"leads to {backend.token_to_id(token.content)}, which is used"
            for token_id, token in self.added.items()
            if backend.token_to_id(token.content) != token_id
        ]


def optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _extras(
    path: Path, config: Mapping[str, Any], special_map: Mapping[str, Any]
) -> Iterator[tuple[Path, str, Any]]:
    """Yield the further special tokens that count, with their file and key.

    The newer key replaces the older one in its own file, and a list in the configuration, even an
    empty one, the older one of the map.
    """
    newer, older = "extra_special_tokens", "additional_special_tokens"
    key = newer if config.get(newer) or older not in config else older
    given = config.get(key)
    if not isinstance(special_map.get(newer), dict) or isinstance(given, dict):
        yield path / CONFIG, key, given
    if newer in special_map:
        yield path / SPECIAL_MAP, newer, special_map[newer]
    is_list_known = any(
        one in each and not isinstance(each[one], dict)
        for each, one in ((config, newer), (config, older), (special_map, newer))
    )
    if not is_list_known:
        yield path / SPECIAL_MAP, older, special_map.get(older)


def _decoder(file: Path, value: Any) -> Iterator[tuple[int, AddedToken]]:
    key = "added_tokens_decoder"
    if not isinstance(value, dict):
        raise _wrong(file, key, value)
    for token_id, token in value.items():
        if not token_id.isdecimal() or not isinstance(token, dict):
            raise _wrong(file, f"{key}[{token_id!r}]", token)
        yield int(token_id), _needed(file, f"{key}[{token_id!r}]", {"special": False} | token)


def _added_file(file: Path, special: set[str]) -> Iterator[tuple[int, AddedToken]]:
    for content, token_id in optional_json(file).items():
        if type(token_id) is not int:
            raise CheckpointError(
                f"{file}: the id of {content!r} is {token_id!r:.40}, not a number; correct it, or "
                "fetch the file again"
            )
        is_special = content in special
        yield token_id, AddedToken(content, normalized=not is_special, special=is_special)


def _needed(file: Path, key: str, value: Any) -> AddedToken:
    token = _special(file, key, value)
    if token is None:
        raise _wrong(file, key, value)
    return token


def _special(file: Path, key: str, value: Any) -> AddedToken | None:
    """Return a token from a text or an object; None for other settings under such a key."""
    text = value.get("content") if isinstance(value, dict) else value
    if isinstance(text, str) and not _is_unicode(text):
        raise _wrong(file, key, value)
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    if not isinstance(value, dict):
        return None
    flags = {
        name: value[name]
        for name in ("lstrip", "rstrip", "single_word", "normalized", "special")
        if name in value
    }
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise _no_flag(file, f"{key}: {name}", flag)
    content = value.get("content")
    if not isinstance(content, str):
        raise _wrong(file, key, value)
    return AddedToken(content, **({"special": True} | flags))


def _is_unicode(text: str) -> bool:
    """Return False for half of a surrogate pair, which JSON can write and no text has."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _wrong(file: Path, key: str, value: Any) -> CheckpointError:
    return CheckpointError(
        f"{file}: {key} is {value!r:.60}, which is no token; correct it, or fetch the file again"
    )


def _no_flag(file: Path, key: str, value: Any) -> CheckpointError:
    return CheckpointError(f"{file}: {key} is {value!r:.60}; write true or false, or leave it out")


def _class_roles(config: Mapping[str, Any], backend: Tokenizer) -> dict[str, Any]:
    kind = _class_of(config)
    if kind == _LLAMA and _is_byte_level(backend):
        return {}
    roles = CLASS_ROLES.get(kind, {})
    return {role: text for role, text in roles.items() if backend.token_to_id(text) is not None}


def _class_of(config: Mapping[str, Any]) -> str:
    return str(config.get("tokenizer_class", "")).removesuffix("Fast")


def _set_space_prefix(backend: Tokenizer, config: Mapping[str, Any], file: Path) -> None:
    """Put a space before words at the beginning of a text, or not, as the class does.

    Only where versions of transformers agree: elsewhere tokenizer.json decides.
    """
    kind = _class_of(config)
    wanted = config.get("add_prefix_space")
    if wanted is not None and not isinstance(wanted, bool):
        raise _no_flag(file, "add_prefix_space", wanted)
    if kind in _BYTE_LEVEL:
        rules: Any = backend.pre_tokenizer
        is_sequence = isinstance(rules, pre_tokenizers.Sequence)
        for rule in rules if is_sequence else [rules]:
            if isinstance(rule, pre_tokenizers.ByteLevel):
                rule.add_prefix_space = bool(wanted)
    elif kind == _LLAMA and isinstance(wanted, bool) and not _is_byte_level(backend):
        prefix = "always" if config.get("legacy") else "first"
        backend.normalizer = None
        backend.pre_tokenizer = pre_tokenizers.Metaspace(
            SPACE_MARK, prepend_scheme=prefix if wanted else "never", split=False
        )
        steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence(
            [*steps, decoders.Strip(" ", 1, 0)] if wanted else steps
        )


def _is_byte_level(backend: Tokenizer) -> bool:
    return "ByteLevel" in f"{backend.pre_tokenizer}{backend.decoder}"
