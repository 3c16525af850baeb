"""Folders without tokenizer.json, against SentencePiece (record_pieces.py) and transformers."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from appliance.errors import ModelError, UnsupportedModelError
from appliance.tokenizer import Tokenizer
from appliance.tokenizer.pre_tokenizers import GPT4O, TEKKEN

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "recorded_pieces.json").read_text())
MODELS = {name: base64.b64decode(one["model"]) for name, one in RECORDED["models"].items()}


def with_pieces(folder: Path, model: bytes, **config: Any) -> Path:
    (folder / "tokenizer.model").write_bytes(model)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_ids_of_pieces_are_sentencepieces(name: str, tmp_path: Path) -> None:
    recorded = RECORDED["models"][name]
    tokenizer = Tokenizer.from_path(with_pieces(tmp_path, MODELS[name]))
    for text, ids in zip(RECORDED["texts"], recorded["ids"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.encode(text, add_special_tokens=True) == [recorded["bos"], *ids], text
    assert tokenizer.bos_token_id == recorded["bos"]
    assert tokenizer.eos_token_ids == (recorded["eos"],)
    assert not tokenizer.notes


@pytest.mark.parametrize("legacy", [True, False])
def test_a_space_behind_control_tokens_is_as_the_configuration_says(
    legacy: bool, tmp_path: Path
) -> None:
    """Older code, that of Llama 2's folders, adds one (huggingface/transformers#24565)."""
    folder = with_pieces(tmp_path, MODELS["llama"], tokenizer_class="LlamaTokenizer", legacy=legacy)
    tokenizer = Tokenizer.from_path(folder)
    ids = tokenizer.encode("the</s>the", add_special_tokens=False)
    texts = [tokenizer.token_text(token_id) for token_id in ids]
    assert "".join(texts) == (" the</s> the" if legacy else " the</s>the")


def test_tokens_and_ends_of_the_configuration_count_beside_pieces(tmp_path: Path) -> None:
    config = {
        "add_bos_token": False,
        "add_eos_token": True,
        "added_tokens_decoder": {"380": {"content": "<|im_end|>", "special": True}},
    }
    tokenizer = Tokenizer.from_path(with_pieces(tmp_path, MODELS["llama"], **config))
    assert tokenizer.encode("<|im_end|>", add_special_tokens=True)[-2:] == [380, 2]
    assert tokenizer.eos_token_ids == (2, 380)
    assert not tokenizer.add_bos


def with_merges(folder: Path, model_type: str, **config: Any) -> Path:
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the", "Ġt", "Ġthe", "12", "##"]
    pieces += ["<|endoftext|>", "</s>"]
    (folder / "vocab.json").write_text(json.dumps({p: i for i, p in enumerate(pieces)}))
    merges = "#version: 0.2\nt h\nth e\nĠ t\nĠ the\n1 2\n# #\n"
    (folder / "merges.txt").write_text(merges)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("gpt2", {"tokenizer_class": "GPT2Tokenizer"}),
        ("gpt2", {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}),
        ("opt", {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "bos_token": "</s>"}),
        ("qwen2", {"tokenizer_class": "Qwen2Tokenizer"}),
        (
            "qwen3",
            {
                "tokenizer_class": "Qwen2Tokenizer",
                "added_tokens_decoder": {"264": {"content": "<|im_end|>", "special": True}},
                "eos_token": "<|im_end|>",
            },
        ),
    ],
)
def test_ids_of_merges_are_those_of_transformers(
    model_type: str, config: dict[str, Any], tmp_path: Path
) -> None:
    folder = with_merges(tmp_path, model_type, **config)
    ours, theirs = Tokenizer.from_path(folder), AutoTokenizer.from_pretrained(folder)
    rng = random.Random(1)
    atoms = ["the", " the", "  ", "12", "123", "##", "'S", "e\u0301", "中", "\n\n", "🙂", "T",
             "<|endoftext|>", "<|im_end|>"]  # fmt: skip
    for text in ("", *("".join(rng.choices(atoms, k=6)) for _ in range(40))):
        assert ours.encode(text, add_special_tokens=True) == theirs(text)["input_ids"], text
    assert ours.eos_token_ids[0] == theirs.eos_token_id


def test_the_rules_of_merges_follow_the_model_without_a_configuration(tmp_path: Path) -> None:
    folder = with_merges(tmp_path, "qwen2")
    (folder / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_path(folder)
    one, two = tokenizer.encode("12", add_special_tokens=False)  # though there is a piece
    assert tokenizer.token_text(one) + tokenizer.token_text(two) == "12"


# Single bytes, then longer tokens in the order of their ranks.
RANKED = [bytes([byte]) for byte in range(256)] + [
    b"th", b" t", b"the", b" the", b"aa", b"aaa", b"aaaa", b"\xe4\xb8", "中".encode(), b"12",
    b"  ", b"    ", b"xaa", b"ab", b"aab", b"\n\n",
]  # fmt: skip
TEXTS = [
    "".join(random.Random(seed).choices(["the", " the", "a", "aa", "ab", "xa", "中", "12", "123",
            "  ", "\n", "\n\n", "é", "🙂", "THE", "'s"], k=8))
    for seed in range(60)
]  # fmt: skip


def tekken(**changes: Any) -> dict[str, Any]:
    special = ["<unk>", "<s>", "</s>", "[INST]"]
    config = {
        "pattern": TEKKEN,
        "default_vocab_size": 10 + len(RANKED),
        "default_num_special_tokens": 10,
    }
    return {
        "config": config,
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate([*RANKED, b"beyond"])
        ],
        "special_tokens": [
            {"rank": rank, "token_str": token, "is_control": True}
            for rank, token in enumerate(special)
        ],
        **changes,
    }


def test_ids_of_tekken_are_those_of_transformers_and_tiktoken(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text(json.dumps(tekken()))
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    ours, theirs = Tokenizer.from_path(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    ranks = {token: 10 + rank for rank, token in enumerate(RANKED)}
    maker = tiktoken.Encoding("tekken", pat_str=TEKKEN, mergeable_ranks=ranks, special_tokens={})
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ids == maker.encode(text), text
        assert ours.encode(f"[INST]{text}", add_special_tokens=True) == [1, 3, *ids]
    assert (ours.bos_token_id, ours.eos_token_ids) == (1, (2,))
    assert ours.vocab_size == 10 + len(RANKED)


def test_ids_of_kimi_are_tiktokens(tmp_path: Path) -> None:
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(RANKED)]
    (tmp_path / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    end = len(RANKED) + 2
    config = {
        "tokenizer_class": "TikTokenTokenizer",
        "eos_token": "[EOS]",
        "added_tokens_decoder": {str(end): {"content": "[EOS]", "special": True}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = Tokenizer.from_path(tmp_path)
    ranks = {token: rank for rank, token in enumerate(RANKED)}
    # Excludes texts that mix Chinese with other letters: they need an intersection that tiktoken
    # lacks.
    pattern = r"[\p{Han}]+|" + GPT4O.replace("[\\r\\n/]*", "[\\r\\n]*")
    maker = tiktoken.Encoding("kimi", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    for text in TEXTS:
        if "中" not in text:
            assert ours.encode(text, add_special_tokens=True) == maker.encode(text), text
    assert ours.encode("[EOS]<|reserved_token_272|>中", add_special_tokens=True) == [end, 272, 264]
    assert ours.eos_token_ids == (end,)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"special_tokens": None}, "has no special_tokens"),
        ({"vocab": [{"rank": 0, "token_bytes": "*"}]}, "not in base 64"),
        ({"vocab": 7}, "is damaged"),
        ({"config": {"pattern": "(a+)+$"}}, "unknown pattern"),
    ],
)
def test_tekken_that_cannot_be_read_is_named(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "tekken.json").write_text(json.dumps(tekken(**changes)))
    with pytest.raises(ModelError, match=reason) as caught:
        Tokenizer.from_path(tmp_path)
    assert str(tmp_path / "tekken.json") in str(caught.value)


@pytest.mark.parametrize("name", ["qwen.tiktoken", "tiktoken.model", "vocab.txt"])
def test_other_forms_are_refused_with_what_helps(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("x")
    with pytest.raises(UnsupportedModelError, match="save_pretrained") as caught:
        Tokenizer.from_path(tmp_path)
    assert str(tmp_path / name) in str(caught.value)


def test_unknown_classes_of_merges_are_named(tmp_path: Path) -> None:
    folder = with_merges(tmp_path, "new", tokenizer_class="NewTokenizer")
    with pytest.raises(UnsupportedModelError, match="'NewTokenizer'"):
        Tokenizer.from_path(folder)


@pytest.mark.parametrize(
    "model",
    [b"", b"\x0a", b"\xff" * 40, b"IQ== 0\nIg== 1\n", MODELS["llama"][:3000], MODELS["llama"][1:]],
)
def test_damaged_pieces_are_refused(model: bytes, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.model"):
        Tokenizer.from_path(with_pieces(tmp_path, model))


def test_damaged_merges_are_refused(tmp_path: Path) -> None:
    (with_merges(tmp_path, "gpt2") / "merges.txt").write_text("q not-there\n")
    with pytest.raises(ModelError, match=r"merges\.txt"):
        Tokenizer.from_path(tmp_path)
