from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import BertTokenizer, GemmaTokenizer, XLMRobertaTokenizer

from appliance.errors import ModelError, UnsupportedModelError
from appliance.tokenizer import DecodeStream, Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def write(path: Path, *, architecture: str = "llama", **fields: Any) -> Path:
    """Write a GGUF file with only a tokenizer; fields are named without `tokenizer.ggml.`."""
    writer = gguf.GGUFWriter(path, architecture)
    chat_template = fields.pop("chat_template", None)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    for key, value in fields.pop("sampling", {}).items():
        add = writer.add_int32 if key == "top_k" else writer.add_float32
        add(f"general.sampling.{key}", value)
    for key, value in fields.items():
        name = f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


PIECES = [
    ("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), ("<|user|>", CONTROL),
    ("  ", USER_DEFINED), ("[tool]", USER_DEFINED), *((f"<0x{b:02X}>", BYTE) for b in range(256)),
    ("\u2581t", NORMAL), ("he", NORMAL), ("\u2581the", NORMAL), ("\u2581th", NORMAL),
    ("ea", NORMAL), ("ac", NORMAL),
    *((c, NORMAL) for c in "\u2581theacr"),
]  # fmt: skip


def sentencepiece_fields(**changes: Any) -> dict[str, Any]:
    fields = {
        "model": "llama",
        "pre": "default",
        "tokens": [piece for piece, _ in PIECES],
        "token_type": [kind for _, kind in PIECES],
        "scores": [-float(index) for index in range(len(PIECES))],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {k: v for k, v in (fields | changes).items() if v is not None}


def byte_level_fields(**changes: Any) -> dict[str, Any]:
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "t", "h", "e", "th", "the", "\u0120",
              "\u0120the", "1", "2", "\u010a", "<think>"]  # fmt: skip
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [CONTROL] * 3 + [NORMAL] * 10 + [USER_DEFINED],
        "merges": ["t h", "th e", "\u0120 the"],
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    return {k: v for k, v in (fields | changes).items() if v is not None}


def tokens_of(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[str]:
    ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return [tokenizer.token_text(token_id) for token_id in ids]


def test_sentencepiece_merges_follow_the_order_of_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_path(write(tmp_path / "t.gguf", **sentencepiece_fields()))
    assert tokens_of(tokenizer, "the cat") == [" the", " ", "c", "a", "t"]
    assert tokens_of(tokenizer, "eac") == [" ", "ea", "c"]
    assert tokenizer.add_bos
    assert tokens_of(tokenizer, "the", add_special_tokens=True) == ["<s>", " the"]


def test_scores_count_where_they_contradict_the_order(tmp_path: Path) -> None:
    scores = [-2.0 if piece == "ea" else -1.0 for piece, _ in PIECES]
    fields = sentencepiece_fields(scores=scores)
    tokenizer = Tokenizer.from_path(write(tmp_path / "t.gguf", **fields))
    assert tokens_of(tokenizer, "eac") == [" ", "e", "ac"]


def test_sentencepiece_text_round_trips(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_path(write(tmp_path / "t.gguf", **sentencepiece_fields()))
    for text in ("the  cat", "é🙂\n\t", " the", ""):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert DecodeStream(tokenizer).push(ids) == (f" {text}" if text else "")


def test_space_prefix_can_be_off(tmp_path: Path) -> None:
    fields = sentencepiece_fields(add_space_prefix=False, add_bos_token=False)
    tokenizer = Tokenizer.from_path(write(tmp_path / "t.gguf", **fields))
    assert tokens_of(tokenizer, "the", add_special_tokens=True) == ["t", "he"]
    assert not tokenizer.add_bos


def test_runs_of_spaces_and_user_defined_tokens_are_whole(tmp_path: Path) -> None:
    fields = sentencepiece_fields(add_space_prefix=False)
    tokenizer = Tokenizer.from_path(write(tmp_path / "t.gguf", **fields))
    assert tokens_of(tokenizer, "a  a[tool]a") == ["a", "  ", "a", "[tool]", "a"]


@pytest.mark.parametrize(("architecture", "rest"), [("llama", "  a"), ("phi3", " a")])
def test_phi3_control_tokens_swallow_space(tmp_path: Path, architecture: str, rest: str) -> None:
    path = write(tmp_path / "t.gguf", architecture=architecture, **sentencepiece_fields())
    tokenizer = Tokenizer.from_path(path)
    assert "".join(tokens_of(tokenizer, "<|user|> a")) == f"<|user|>{rest}"
    assert "".join(tokens_of(tokenizer, "<s> a")) == "<s>  a"


def test_byte_level(tmp_path: Path) -> None:
    fields = byte_level_fields(chat_template="{{ bos_token }}{{ messages[0].content }}")
    tokenizer = Tokenizer.from_path(write(tmp_path / "t.gguf", **fields))
    assert tokens_of(tokenizer, "the the<|im_end|><think>") == [
        "the", " the", "<|im_end|>", "<think>"
    ]  # fmt: skip
    assert tokenizer.eos_token_ids == (2, 0)
    assert not tokenizer.add_bos
    ids = tokenizer.encode_chat([{"role": "user", "content": "the<|im_end|>"}])
    assert ids[0] == 0
    assert 2 not in ids


def test_bos_and_eos_can_be_added(tmp_path: Path) -> None:
    fields = byte_level_fields(add_bos_token=True, add_eos_token=True)
    tokenizer = Tokenizer.from_path(write(tmp_path / "t.gguf", **fields))
    assert tokenizer.encode("the", add_special_tokens=True) == [0, 7, 2]


def test_an_end_of_turn_is_control_whatever_the_file_says(tmp_path: Path) -> None:
    kinds = [CONTROL, CONTROL, USER_DEFINED] + [NORMAL] * 10 + [USER_DEFINED]
    fields = byte_level_fields(token_type=kinds, eos_token_id=0)
    tokenizer = Tokenizer.from_path(write(tmp_path / "t.gguf", **fields))
    assert tokenizer.eos_token_ids == (0, 2)
    ids = tokenizer.encode("the<|im_end|>", add_special_tokens=False)
    assert DecodeStream(tokenizer).push(ids) == "the"


def test_turn_and_message_ends_of_the_file_are_eos(tmp_path: Path) -> None:
    fields = byte_level_fields(eot_token_id=1, eom_token_id=3)
    tokenizer = Tokenizer.from_path(write(tmp_path / "t.gguf", **fields))
    assert tokenizer.eos_token_ids == (2, 1, 3, 0)


def test_defaults_that_come_with_the_word_rules(tmp_path: Path) -> None:
    path = write(tmp_path / "llama3.gguf", **byte_level_fields(pre="llama-bpe", merges=["t h"]))
    llama3 = Tokenizer.from_path(path)
    assert llama3.add_bos
    assert tokens_of(llama3, "the") == ["the"]  # a whole word needs no merges
    qwen2 = Tokenizer.from_path(write(tmp_path / "qwen.gguf", **byte_level_fields(pre="qwen2")))
    assert not qwen2.add_bos


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "holds no tokenizer"),
        (byte_level_fields(tokens=None), "it has no tokens"),
        (byte_level_fields(merges=None), "it has no merges"),
        (byte_level_fields(merges=["t h", "broken"]), "'broken' is not a pair"),
        (byte_level_fields(merges=["t q"]), "download the file again"),
        (byte_level_fields(token_type=[1]), "14 tokens but 1 token types"),
        (byte_level_fields(tokens=7), "tokens is 7"),
        (byte_level_fields(merges=[1, 2]), "it has no merges"),
        (sentencepiece_fields(scores="x"), "scores is 'x'"),
    ],
)
def test_damaged_tokenizers(tmp_path: Path, fields: dict[str, Any], reason: str) -> None:
    path = write(tmp_path / "t.gguf", **fields)
    with pytest.raises(ModelError) as caught:
        Tokenizer.from_path(path)
    assert reason in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "changes", [{"model": "rwkv"}, {"model": "new"}, {"pre": "some-new-rules"}]
)
def test_unknown_kinds_are_named(tmp_path: Path, changes: dict[str, str]) -> None:
    path = write(tmp_path / "t.gguf", **byte_level_fields(**changes))
    with pytest.raises(UnsupportedModelError, match=next(iter(changes.values()))):
        Tokenizer.from_path(path)


@pytest.mark.parametrize("name", [None, "", "default"])
def test_rules_that_the_file_does_not_name_are_those_of_its_vocabulary(
    tmp_path: Path, name: str | None
) -> None:
    """The rules are Llama 3's: no other vocabulary has control tokens at its ids."""
    tokens = byte_level_fields()["tokens"]
    named = {128000: "<|begin_of_text|>", 128001: "<|end_of_text|>", 128009: "<|eot_id|>"}
    tokens += [named.get(index, f"t{index}") for index in range(len(tokens), 128256)]
    kinds = [CONTROL if token.startswith("<|") else NORMAL for token in tokens]
    fields = byte_level_fields(
        tokens=tokens, token_type=kinds, pre=name, bos_token_id=128000, eos_token_id=128009
    )
    old = Tokenizer.from_path(write(tmp_path / "old.gguf", **fields))
    new = Tokenizer.from_path(write(tmp_path / "new.gguf", **fields | {"pre": "llama-bpe"}))
    for text in ("the 12 the", "THE'S the\n\n the"):
        ids = new.encode(text, add_special_tokens=True)
        assert old.encode(text, add_special_tokens=True) == ids
        assert ids[0] == 128000
    assert not new.notes
    (note,) = old.notes
    assert "old.gguf names no rules to split words" in note
    assert "'llama-bpe'" in note


def test_rules_that_nothing_names_are_llama_cpps_with_a_warning(tmp_path: Path) -> None:
    tokens = [*byte_level_fields()["tokens"], "'", "s", "'s", "\u01201", "12"]
    fields = byte_level_fields(
        tokens=tokens, token_type=None, pre=None, merges=["' s", "\u0120 1", "1 2"]
    )
    tokenizer = Tokenizer.from_path(write(tmp_path / "t.gguf", **fields))
    # Its splitter gives "'", "s", " 1212" -> " ", "121", "2": see recorded_splits.json.
    assert tokens_of(tokenizer, "'s 1212") == ["'", "s", " ", "12", "1", "2"]
    (note,) = tokenizer.notes
    assert "tokenizer.ggml.pre" in note
    assert "use a newer file" in note


# Defaults and refusals of ids as in llama.cpp's src/llama-vocab.cpp, `llama_vocab::impl::load`.
@pytest.mark.parametrize("ids", [(None, None), (2**32 - 1, 2**32 - 1), (len(PIECES), 999)])
def test_sentencepiece_without_usable_ids_has_the_usual_ones(
    tmp_path: Path, ids: tuple[int | None, int | None]
) -> None:
    fields = sentencepiece_fields(
        bos_token_id=ids[0], eos_token_id=ids[1], unknown_token_id=None, eot_token_id=2**32 - 1
    )
    tokenizer = Tokenizer.from_path(write(tmp_path / "t.gguf", **fields))
    assert tokenizer.encode("the", add_special_tokens=True)[0] == 1
    assert tokenizer.eos_token_ids == (2,)
    assert len(tokenizer.notes) == 3
    said = "\n".join(tokenizer.notes)
    assert "tokenizer.ggml.eot_token_id is 4294967295" in said
    assert "'<s>' is taken" in said
    assert "'</s>' is taken" in said


def test_a_vocabulary_of_bytes_needs_no_merges(tmp_path: Path) -> None:
    tokens = ["t", "h", "e", "\u0120", "<|endoftext|>"]
    kinds = [NORMAL] * 4 + [CONTROL]
    fields = byte_level_fields(
        tokens=tokens, token_type=kinds, merges=None, bos_token_id=4, eos_token_id=4
    )
    tokenizer = Tokenizer.from_path(write(tmp_path / "t.gguf", **fields))
    assert tokenizer.encode("the the", add_special_tokens=False) == [0, 1, 2, 3, 0, 1, 2]


def test_ends_of_a_file_without_types_are_not_shown(tmp_path: Path) -> None:
    fields = sentencepiece_fields(token_type=None)
    tokenizer = Tokenizer.from_path(write(tmp_path / "t.gguf", **fields))
    ids = tokenizer.encode("the</s>", add_special_tokens=True)
    assert (ids[0], ids[-1]) == (1, 2)
    assert DecodeStream(tokenizer).push(ids) == " the"


def test_ids_beyond_a_byte_level_vocabulary_are_absent(tmp_path: Path) -> None:
    fields = byte_level_fields(eos_token_id=2**32 - 1, padding_token_id=99)
    tokenizer = Tokenizer.from_path(write(tmp_path / "t.gguf", **fields))
    assert tokenizer.eos_token_ids == (2, 0)  # by their texts
    assert len(tokenizer.notes) == 2


def test_gemma4_has_pieces_and_merges(tmp_path: Path) -> None:
    """The expected ids are those of transformers' class for this kind of vocabulary."""
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    words = [
        "t",
        "h",
        "e",
        "th",
        "the",
        "\u2581",
        "\u2581the",
        "\n",
        "\n\n",
        "\u2581\u2581",
        "\u4e2d",
    ]
    tokens = [*control, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("\n", "\n"), ("\u2581", "\u2581")]
    path = write(
        tmp_path / "t.gguf",
        architecture="gemma4",
        model="gemma4",
        tokens=tokens,
        token_type=[CONTROL] * 3 + [UNKNOWN, CONTROL] + [BYTE] * 256 + [NORMAL] * len(words),
        merges=[" ".join(merge) for merge in merges],
        bos_token_id=2,
        eos_token_id=1,
        unknown_token_id=3,
        add_bos_token=False,  # early files have it so; llama.cpp adds BOS nevertheless
        add_space_prefix=False,
    )
    tokenizer = Tokenizer.from_path(path)
    theirs = GemmaTokenizer(
        vocab={token: index for index, token in enumerate(tokens)}, merges=merges
    )
    for text in ("the the", "  the\n\n\nthe  ", "\u4e2dthe\u4e2d", "h\u00e9\U0001f642\tthx", ""):
        ids = tokenizer.encode(text, add_special_tokens=True)
        assert ids == [2, *theirs.encode(text, add_special_tokens=False)]
        assert tokenizer.decode(ids) == text


def test_recommended_sampling_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    assert not Tokenizer.from_path(write(path, **sentencepiece_fields())).sampling
    recommended: dict[str, float] = {"temp": 0.6, "top_p": 0.95, "top_k": 20, "penalty_repeat": 1.1}
    sampling = Tokenizer.from_path(
        write(path, sampling=recommended, **sentencepiece_fields())
    ).sampling
    assert sampling.values == {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "repetition_penalty": 1.1,
    }
    assert sampling.source == "the metadata of m.gguf"


def test_a_token_of_a_million_characters_is_refused_before_it_is_taken_apart(
    tmp_path: Path,
) -> None:
    fields = sentencepiece_fields()
    fields["tokens"][-1] = "x" * 10**6
    path = write(tmp_path / "model.gguf", **fields)
    with pytest.raises(ModelError, match="1000000 characters"):
        Tokenizer.from_path(path)


ENCODER_TEXTS = [
    "The cats saw a cat.",
    "na\u00efve CAF\u00c9 caf\u00e9s!",
    " \t two  spaces\n\nand lines ",
    "\u732b\u3068\u72ac cat\u732bs",
    "[SEP] catssaw \u00e9\u00e9 <s>",
    "",
    "c" * 120,
]


@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize("cased", [False, True])
def test_wordpiece_has_the_ids_of_transformers(tmp_path: Path, cased: bool, says: bool) -> None:
    """The file marks the beginning of a word, BERT's vocabulary marks continuations."""
    words = ["the", "cat", "saw", "a", "na", "cafe", "caf\u00e9", "\u732b", "two", ".", "!", "c"]
    words += ["The", "CAF", "B"] if cased else []
    control = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]"]
    pieces = [*control, *words, *(f"##{end}" for end in ("s", "ive", "c", "\u00c9"))]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces), "utf-8")
    oracle = BertTokenizer(str(tmp_path / "vocab.txt"), do_lower_case=not cased)
    stored = [
        piece if index < 5 else piece[2:] if piece[:2] == "##" else f"\u2581{piece}"
        for index, piece in enumerate(pieces)
    ]
    fields: dict[str, Any] = {"tokens": stored, "token_type": [3] * 5 + [1] * (len(stored) - 5)}
    if says:
        fields |= {"normalizer.lowercase": not cased, "cls_token_id": 2, "seperator_token_id": 3}
    path = write(tmp_path / "t.gguf", architecture="bert", model="bert", **fields)
    ours = Tokenizer.from_path(path)
    for text in ENCODER_TEXTS:
        wanted = oracle(text, split_special_tokens=True)["input_ids"]
        assert ours.encode(text, add_special_tokens=True, allow_special=False) == wanted, text
    pair = oracle("a cat", "saw")
    assert ours.encode_pair("a cat", "saw") == (
        pair["input_ids"],
        pair["token_type_ids"].index(1),
    )


def test_unigram_has_the_ids_of_transformers(tmp_path: Path) -> None:
    """The vocabulary is XLM-R's, as in BGE-M3's files."""
    control = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    words = [
        "\u2581",
        "\u2581the",
        "\u2581cat",
        "s",
        "cat",
        "\u2581saw",
        "a",
        "c",
        "\u2581two",
        ".",
    ]
    pieces = [*control, *((word, -1.0 - index / 4) for index, word in enumerate(words))]
    pieces.append(("<mask>", 0.0))
    oracle = XLMRobertaTokenizer(vocab=pieces)
    path = write(
        tmp_path / "t.gguf",
        architecture="bert",
        model="t5",
        tokens=[piece for piece, _ in pieces],
        scores=[score for _, score in pieces],
        token_type=[3, 3, 3, 2, *[1] * len(words), 3],
        bos_token_id=0,
        eos_token_id=2,
        unknown_token_id=3,
        seperator_token_id=2,
        add_bos_token=True,
        add_eos_token=True,
        add_sep_token=True,
        add_space_prefix=True,
    )
    ours = Tokenizer.from_path(path)
    for text in ENCODER_TEXTS:
        wanted = oracle(text, split_special_tokens=True)["input_ids"]
        assert ours.encode(text, add_special_tokens=True, allow_special=False) == wanted, text
    assert ours.encode_pair("the cat", "saw")[0] == oracle("the cat", "saw")["input_ids"]
