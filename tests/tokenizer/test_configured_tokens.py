"""Tokens of a folder's small files, against transformers' AutoTokenizer on random texts.

APPLIANCE_TEST_CHANGES sets how many random changes of each case are tried, and
APPLIANCE_TEST_CHANGES_SEED which ones.
"""

from __future__ import annotations

import inspect
import json
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from support.models.random_changes import random_changes
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from appliance.errors import ApplianceError, CheckpointError
from appliance.tokenizer import Tokenizer
from appliance.tokenizer.configured_tokens import CLASS_ROLES

END, MARK = "<|im_end|>", "<|x|>"
FIRST = 262  # the id after the vocabulary of `byte_level`
ATOMS = [END, MARK, "<|named|>", "<s>", "</s>", "xyz", "ABC", "the", " the", "  ", "\n", "\t",
         "1234", "中文", "é", "e\u0301", "🙂", "\u200d", "'s", "<", "|>", " ", "T"]  # fmt: skip


def byte_level(
    *added: AddedToken, bos: bool = False, prefix: bool = False, composed: bool = False
) -> tokenizers.Tokenizer:
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the", "Ġt", "Ġthe"]
    pieces += ["<|named|>", "<|plain|>"]
    merges = [("t", "h"), ("th", "e"), ("Ġ", "t"), ("Ġ", "the")]
    backend = tokenizers.Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.decoder = decoders.ByteLevel()
    if composed:
        backend.normalizer = normalizers.NFC()
    backend.add_tokens(list(added))
    if bos:
        add_bos(backend)
    return backend


def sentencepiece(how: str) -> tokenizers.Tokenizer:
    """A tokenizer like Llama's; `how` is Metaspace's scheme, or "older" for its old normalizer."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "t", "h", "e", "▁t", "he", "▁the", "the", "k", "o", "▁▁"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("t", "he"), ("▁", "▁")]
    backend = tokenizers.Tokenizer(
        models.BPE(
            {p: i for i, p in enumerate(pieces)},
            merges,
            fuse_unk=True,
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    mark = normalizers.Replace(" ", "▁")
    if how == "older":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), mark])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=how, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken("<unk>", normalized=False)])
    add_bos(backend)
    return backend


def add_bos(backend: tokenizers.Tokenizer) -> None:
    backend.add_special_tokens(["<s>", "</s>"])
    bos = ("<s>", backend.token_to_id("<s>"))
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[bos])


def token(content: str, **flags: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": content, **plain, "special": True, **flags}


def unsaid(content: str, **flags: bool) -> dict[str, Any]:
    """The settings that special_tokens_map.json has instead."""
    return {key: value for key, value in token(content, **flags).items() if key != "special"}


def typed(content: str, **flags: bool) -> dict[str, Any]:
    return {"__type": "AddedToken"} | token(content, **flags)


def plain_end(**flags: bool) -> AddedToken:
    return AddedToken(END, normalized=False, **flags)


def decoder(*tokens: dict[str, Any], first: int = FIRST) -> dict[str, dict[str, Any]]:
    return {str(first + index): one for index, one in enumerate(tokens)}


Case = tuple[tokenizers.Tokenizer, Mapping[str, Any], Mapping[str, Any]]
# Backend, tokenizer_config.json, other files.
CASES: dict[str, Case] = {
    "decoder": (
        byte_level(),
        {"added_tokens_decoder": decoder(token(END), token(MARK, lstrip=True, rstrip=True))},
        {},
    ),
    "decoder changes flags": (
        byte_level(plain_end()),
        {"added_tokens_decoder": decoder(token(END, lstrip=True))},
        {},
    ),
    "decoder takes flags away": (
        byte_level(plain_end(special=True, rstrip=True)),
        {"added_tokens_decoder": decoder(token(END))},
        {},
    ),
    "decoder makes plain": (
        byte_level(plain_end(special=True)),
        {"added_tokens_decoder": decoder(token(END, special=False))},
        {},
    ),
    "decoder names pieces": (
        byte_level(),
        {"added_tokens_decoder": decoder(token("<|named|>"), token("<|plain|>"), first=FIRST - 2)},
        {},
    ),
    "decoder with words": (
        byte_level(),
        {
            "added_tokens_decoder": decoder(
                token("xyz", special=False, single_word=True),
                token("ABC", special=False, normalized=True),
            )
        },
        {},
    ),
    "decoder with a gap": (
        byte_level(),
        {"added_tokens_decoder": {"270": token(END), "280": token(MARK)}},
        {},
    ),
    "role makes special": (
        byte_level(),
        {"eos_token": END, "added_tokens_decoder": decoder(token(END, special=False))},
        {},
    ),
    "added_tokens.json": (
        byte_level(),
        {"eos_token": END},
        {"added_tokens.json": {MARK: FIRST + 1, END: FIRST}},
    ),
    "additional": (byte_level(), {"additional_special_tokens": [END, "<|named|>"]}, {}),
    "additional with flags": (
        byte_level(),
        {"additional_special_tokens": [typed(END, lstrip=True)]},
        {},
    ),
    "extra": (byte_level(), {"extra_special_tokens": [END, MARK]}, {}),
    "extra by role": (byte_level(), {"extra_special_tokens": {"image_token": END}}, {}),
    "role of its own": (byte_level(), {"image_token": END}, {}),
    "roles in another order": (
        byte_level(),
        {"pad_token": "<|y|>", "image_token": "<|z|>", "eos_token": MARK, "bos_token": END},
        {},
    ),
    "roles": (byte_level(), {"eos_token": "<|named|>", "bos_token": END, "pad_token": MARK}, {}),
    "role with flags": (byte_level(), {"eos_token": typed(END, rstrip=True)}, {}),
    "special map": (
        byte_level(),
        {},
        {
            "special_tokens_map.json": {
                "eos_token": unsaid(END, lstrip=True),
                "additional_special_tokens": [MARK],
            }
        },
    ),
    "special map with extra ones": (
        byte_level(),
        {"extra_special_tokens": ["<|y|>"]},
        {"special_tokens_map.json": {"extra_special_tokens": [unsaid(END, lstrip=True), MARK]}},
    ),
    "special map beside an empty list": (
        byte_level(),
        {"extra_special_tokens": []},
        {"special_tokens_map.json": {"eos_token": END, "additional_special_tokens": [MARK]}},
    ),
    "special map beside another list": (
        byte_level(),
        {"additional_special_tokens": ["<|y|>"]},
        {"special_tokens_map.json": {"eos_token": END, "additional_special_tokens": [MARK]}},
    ),
    "special map beside named roles": (
        byte_level(),
        {"extra_special_tokens": {"image_token": "<|y|>"}},
        {"special_tokens_map.json": {"eos_token": END, "additional_special_tokens": [MARK]}},
    ),
    "special map with extra roles": (
        byte_level(),
        {},
        {"special_tokens_map.json": {"extra_special_tokens": {"image_token": END}}},
    ),
    "extra and additional": (
        byte_level(),
        {"extra_special_tokens": [END], "additional_special_tokens": [MARK]},
        {},
    ),
    "a role of null": (byte_level(), {"eos_token": None, "pad_token": None}, {}),
    "no added tokens": (
        byte_level(),
        {"added_tokens_decoder": {}, "eos_token": END},
        {"added_tokens.json": {MARK: FIRST}},
    ),
    "special map is older than the decoder": (
        byte_level(),
        {"added_tokens_decoder": decoder(token(MARK))},
        {"special_tokens_map.json": {"eos_token": END, "additional_special_tokens": ["<|y|>"]}},
    ),
    "special map wins without a decoder": (
        byte_level(),
        {"eos_token": MARK},
        {"special_tokens_map.json": {"eos_token": END}},
    ),
}
for split in (True, False):
    CASES[f"split_special_tokens {split}"] = (
        byte_level(plain_end(special=True), bos=True),
        {
            "split_special_tokens": split,
            "bos_token": "<s>",
            "added_tokens_decoder": decoder(
                token(MARK, lstrip=True), token("xyz", special=False), first=FIRST + 3
            ),
        },
        {},
    )
for added_bos in (True, False):
    for kind in ("LlamaTokenizerFast", "PreTrainedTokenizerFast", "GPT2TokenizerFast"):
        CASES[f"{kind}, add_bos_token {added_bos}"] = (
            byte_level(bos=not added_bos),
            {
                "tokenizer_class": kind,
                "add_bos_token": added_bos,
                "add_eos_token": True,
                "bos_token": "<s>",
                "eos_token": "</s>",
            },
            {},
        )
for prefix in (True, False, None):
    config = {} if prefix is None else {"add_prefix_space": prefix}
    for kind in ("GPT2Tokenizer", "GPTNeoXTokenizerFast", "PreTrainedTokenizerFast"):
        CASES[f"{kind}, prefix {prefix}"] = (
            byte_level(prefix=prefix is None, composed="NeoX" in kind),
            {"tokenizer_class": kind, "bos_token": "<|named|>", "eos_token": "<|named|>", **config},
            {},
        )
    for how in ("older", "first", "never"):
        for legacy in (True, False):
            if prefix is None and (how, legacy) != ("first", False):
                continue  # transformers 5.24 treats it in its own way, 4.57 does not
            CASES[f"Llama {how}, legacy {legacy}, prefix {prefix}"] = (
                sentencepiece(how),
                {
                    "tokenizer_class": "LlamaTokenizer",
                    "legacy": legacy,
                    "bos_token": "<s>",
                    **config,
                },
                {},
            )


def write(folder: Path, case: Case) -> Path:
    backend, config, files = case
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    usual = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, content in ({"tokenizer_config.json": usual | {**config}} | {**files}).items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("name", CASES)
def test_ids_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path, CASES[name])
    ours, theirs = Tokenizer.from_path(folder), AutoTokenizer.from_pretrained(folder)
    rng = random.Random(name)
    texts = ["".join(rng.choices(ATOMS, k=rng.randint(1, 9))) for _ in range(40)]
    for text in (f"the {END} the", f"a {MARK} b<|named|>", *texts):
        assert ours.encode(text, add_special_tokens=True) == theirs(text)["input_ids"], text
    if theirs.bos_token_id is not None:
        assert ours.bos_token_id == theirs.bos_token_id
    if theirs.eos_token_id is not None:
        assert ours.eos_token_ids[0] == theirs.eos_token_id
    assert bool(ours.notes) == ("gap" in name or name == "split_special_tokens True")


@pytest.mark.parametrize("split", [True, False])
def test_so_are_those_of_chats(split: bool, tmp_path: Path) -> None:
    template = f"{{% for message in messages %}}the{END}{{{{ message.content }}}}{{% endfor %}}"
    settings = {"split_special_tokens": split, "chat_template": template}
    folder = write(tmp_path, (byte_level(plain_end(special=True)), settings, {}))
    ours, theirs = Tokenizer.from_path(folder), AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "the the"}]
    assert ours.encode_chat(chat) == theirs.apply_chat_template(chat)["input_ids"]


CHANGES = int(os.environ.pop("APPLIANCE_TEST_CHANGES", "3"))
SEED = os.environ.pop("APPLIANCE_TEST_CHANGES_SEED", "1")
# Settings for batches of training, which transformers checks but no prompt depends on; an unknown
# class name means no class.
UNREAD = {
    "padding_side", "truncation_side", "model_max_length", "model_input_names",
    "clean_up_tokenization_spaces", "tokenizer_class",
}  # fmt: skip
SETTINGS = UNREAD | {
    "bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token",
    "additional_special_tokens", "extra_special_tokens", "added_tokens_decoder", "image_token",
    "add_bos_token", "add_eos_token", "chat_template", "split_special_tokens",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("Llama")])
def test_a_setting_changed_at_random_is_refused_by_name_or_gives_the_same_ids(
    name: str, tmp_path: Path
) -> None:
    backend, given, files = CASES[name]
    folder = write(tmp_path, (backend, {}, files))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | dict(given)
    texts = [f"the {END} the a {MARK} b<|named|>", "xyz ABC  the1234", "<s>the</s>"]
    found = []
    for change in random_changes(config, SETTINGS, random.Random(f"{SEED} {name}"), CHANGES):
        keys = (change.key, *change.also)
        (folder / "tokenizer_config.json").write_text(json.dumps(change.config))
        try:
            tokenizer = Tokenizer.from_path(folder)
        except ApplianceError as error:
            if not any(key in str(error) for key in keys):
                found.append(f"{change}: refused without its name: {error}")
            continue
        except Exception as error:
            found.append(f"{change}: {type(error).__name__}: {error}")
            continue
        ours = [tokenizer.encode(text, add_special_tokens=True) for text in texts]
        try:
            theirs = AutoTokenizer.from_pretrained(folder)
            expected = [theirs(text)["input_ids"] for text in texts]
        except Exception:  # it raises any kind of error
            if not UNREAD & {*keys}:
                found.append(f"{change}: accepted, and refused by transformers")
            continue
        if ours != expected:
            found.append(f"{change}: other ids")
    assert "\n".join(found) == ""


@pytest.mark.parametrize(
    ("role", "value"), [("bos_token", 1.5), ("mask_token", ["<m>"]), ("pad_token", False)]
)
def test_a_role_that_is_no_token_is_refused(role: str, value: Any, tmp_path: Path) -> None:
    folder = write(tmp_path, (byte_level(), {role: value}, {}))
    with pytest.raises(TypeError, match=role):
        AutoTokenizer.from_pretrained(folder)
    with pytest.raises(CheckpointError, match=f"tokenizer_config.json: {role} is"):
        Tokenizer.from_path(folder)


@pytest.mark.parametrize("kind", CLASS_ROLES)
def test_roles_of_classes_are_those_of_transformers(kind: str) -> None:
    settings = inspect.signature(getattr(transformers, kind).__init__).parameters
    defaults = {name: one.default for name, one in settings.items() if name.endswith("_token")}
    assert {name: text for name, text in defaults.items() if text} == CLASS_ROLES[kind]


def test_an_end_that_only_the_configuration_names_ends_and_is_not_shown(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_path(write(tmp_path, CASES["decoder"]))
    assert tokenizer.eos_token_ids == (FIRST,)
    assert tokenizer.decode([*tokenizer.encode("the", add_special_tokens=False), FIRST]) == "the"


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": token(END)}}, "decoder['x']"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"3": END}},
            "added_tokens_decoder['3']",
        ),
        ("tokenizer_config.json", {"additional_special_tokens": [7]}, "additional_special_tokens"),
        ("tokenizer_config.json", {"eos_token": {"content": 7}}, "eos_token is"),
        ("tokenizer_config.json", {"eos_token": "\ud83d"}, "eos_token is '\\ud83d'"),
        ("tokenizer_config.json", {"extra_special_tokens": 16}, "extra_special_tokens is 16"),
        ("tokenizer_config.json", {"additional_special_tokens": "<x>"}, "tokens is '<x>'"),
        ("tokenizer_config.json", {"split_special_tokens": "yes"}, "split_special_tokens is 'yes'"),
        ("special_tokens_map.json", {"eos_token": {"content": 7}}, "eos_token is"),
        ("special_tokens_map.json", {"additional_special_tokens": [7]}, "special_tokens is 7"),
        (
            "special_tokens_map.json",
            {"extra_special_tokens": {"image_token": 7}},
            "extra_special_tokens: image_token is 7",
        ),
        ("added_tokens.json", {END: "262"}, "the id of '<|im_end|>' is '262'"),
    ],
)
def test_damaged_tokens_are_named(
    tmp_path: Path, file: str, content: dict[str, Any], named: str
) -> None:
    write(tmp_path, (byte_level(), {}, {file: content}))
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_path(tmp_path)
    assert file in str(caught.value)
    assert named in str(caught.value)
