from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from appliance.errors import ModelError, RequestError
from appliance.tokenizer import DecodeStream, Tokenizer
from appliance.tokenizer.chat_template import ChatTemplate
from appliance.tokenizer.source import TokenizerSource

FRAGMENTS = ["<|im_end|>", "<|im_start|>", "<|end|>", "<s>", "<think>", "<|im_", "<", " ", "\n",
             "the fox", "é🙂", "a", "|>"]  # fmt: skip
TURNS = "{% for m in messages %}{{ m.content }}<x>{% endfor %}"
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=5), max_size=8).map("".join)


@given(text=texts)
def test_equals_the_library_with_control_tokens(
    tokenizer: Tokenizer, native: tokenizers.Tokenizer, text: str
) -> None:
    expected = native.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, add_special_tokens=False) == expected


@given(text=texts)
def test_control_tokens_stay_text_when_not_allowed(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False, allow_special=False)
    control = {tokenizer.encode(t, add_special_tokens=False)[0] for t in ("<|im_end|>", "<s>")}
    assert control.isdisjoint(ids)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text


def sentencepiece(*, prepend: str) -> tokenizers.Tokenizer:
    """A character vocabulary that prepends its space mark in one of two ways."""
    pieces = ["<unk>", "\u2581", *"abcdefgh<|>xyz", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = tokenizers.Tokenizer(
        models.BPE(
            {piece: index for index, piece in enumerate(pieces)},
            [],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    if prepend == "normalizer":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([AddedToken("<x>", normalized=False, rstrip=True)])
    return backend


@pytest.mark.parametrize("prepend", ["normalizer", "first", "always", "never"])
@pytest.mark.parametrize("text", ["ab", " ab", "<x>ab", "ab<x>  cd<x>", "<x><x>", "a <x b>", "é"])
def test_prefix_spaces_and_stripping_follow_the_library(prepend: str, text: str) -> None:
    ours = Tokenizer(TokenizerSource(sentencepiece(prepend=prepend), None, (), None))
    native = sentencepiece(prepend=prepend)
    expected = native.encode(text, add_special_tokens=False).ids
    assert ours.encode(text, add_special_tokens=False) == expected


@pytest.mark.parametrize("prepend", ["normalizer", "first", "always", "never"])
@settings(max_examples=40)
@given(chat=st.lists(texts.filter(lambda text: "<x>" not in text), max_size=4))
def test_a_chat_is_tokenized_as_its_whole_text(prepend: str, chat: list[str]) -> None:
    tokenizer = Tokenizer(
        TokenizerSource(sentencepiece(prepend=prepend), None, (), ChatTemplate(TURNS, {}))
    )
    expected = sentencepiece(prepend=prepend).encode(
        "".join(f"{content}<x>" for content in chat), add_special_tokens=False
    )
    messages = [{"role": "user", "content": content} for content in chat]
    for _ in range(2):
        assert tokenizer.encode_chat(messages) == expected.ids


@settings(max_examples=40)
@given(chat=st.lists(texts.filter(lambda text: "<s>" not in text), max_size=4))
def test_a_byte_level_chat_too(native: tokenizers.Tokenizer, chat: list[str]) -> None:
    turns = "{% for m in messages %}<s>{{ m.content }}{% endfor %}"
    backend = tokenizers.Tokenizer.from_str(native.to_str())
    tokenizer = Tokenizer(TokenizerSource(backend, None, (), ChatTemplate(turns, {})))
    control = [token.content for token in backend.get_added_tokens_decoder().values()]
    plain = [text for text in chat if not any(word in text for word in control)]
    expected = native.encode("".join(f"<s>{text}" for text in plain), add_special_tokens=False)
    messages = [{"role": "user", "content": content} for content in plain]
    for _ in range(2):
        assert tokenizer.encode_chat(messages) == expected.ids


def test_properties(tokenizer: Tokenizer, native: tokenizers.Tokenizer) -> None:
    assert tokenizer.vocab_size == native.get_vocab_size()
    assert tokenizer.bos_token_id == tokenizer.encode("<s>", add_special_tokens=False)[0]
    assert not tokenizer.add_bos
    end = tokenizer.encode("<|im_end|>", add_special_tokens=False)[0]
    assert tokenizer.eos_token_ids[0] == end
    assert tokenizer.token_text(end) == "<|im_end|>"
    assert tokenizer.token_bytes(end) == b"<|im_end|>"


def test_ids_outside_the_vocabulary_have_no_text(tokenizer: Tokenizer) -> None:
    outside = [tokenizer.vocab_size, tokenizer.vocab_size + 1000, -1]
    assert [tokenizer.token_bytes(token_id) for token_id in outside] == [b""] * 3
    assert tokenizer.decode(outside) == ""
    assert DecodeStream(tokenizer).push(outside) == ""


def test_lone_surrogates_are_a_request_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="lone surrogate at character 2"):
        tokenizer.encode("ab\ud800", add_special_tokens=False)


def test_tokens_that_are_part_of_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🙂", add_special_tokens=False)
    assert len(ids) == 4
    assert b"".join(map(tokenizer.token_bytes, ids)) == "🙂".encode()
    assert tokenizer.token_text(ids[0]) == "\ufffd"


@given(text=st.text(max_size=40), cuts=st.lists(st.integers(1, 5), max_size=30))
def test_stream_gives_the_text_back_whatever_the_cuts(
    tokenizer: Tokenizer, text: str, cuts: list[int]
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False, allow_special=False)
    stream, out = DecodeStream(tokenizer), ""
    while ids:
        count = cuts.pop() if cuts else 1
        piece = stream.push(ids[:count])
        assert "\ufffd" not in piece or "\ufffd" in text
        out, ids = out + piece, ids[count:]
    assert out + stream.flush() == text


@given(data=st.lists(st.integers(0, 255), max_size=12))
def test_stream_of_broken_characters_ends_like_a_whole_decode(
    tokenizer: Tokenizer, native: tokenizers.Tokenizer, data: list[int]
) -> None:
    by_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    ids = [by_byte[bytes((byte,))] for byte in data]
    stream = DecodeStream(tokenizer)
    out = "".join(stream.push((token_id,)) for token_id in ids) + stream.flush()
    assert out == bytes(data).decode("utf-8", "replace") == native.decode(ids)


@given(data=st.data())
def test_stream_of_any_tokens_is_the_text_of_their_bytes(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=20))
    stream = DecodeStream(tokenizer)
    out = "".join(stream.push((token_id,)) for token_id in ids) + stream.flush()
    assert out == b"".join(map(tokenizer.visible_bytes, ids)).decode("utf-8", "replace")
    assert stream.push(ids) + stream.flush() == out, "a stream that was flushed begins anew"


def test_stream_skips_control_tokens_and_keeps_added_ones(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<s><think>the fox<|im_end|>", add_special_tokens=False)
    assert DecodeStream(tokenizer).push(ids) == "<think>the fox" == tokenizer.decode(ids)


def test_a_kind_of_vocabulary_that_is_not_known_is_refused() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(ModelError, match="neither byte-level, SentencePiece nor WordPiece"):
        Tokenizer(TokenizerSource(backend, None, (), None))


def test_threads_do_not_disturb_one_another(tokenizer: Tokenizer) -> None:
    text = "the quick brown fox<|im_end|> " * 50
    plain = tokenizer.encode(text, add_special_tokens=False, allow_special=False)
    special = tokenizer.encode(text, add_special_tokens=False)
    assert plain != special

    def work(index: int) -> bool:
        allowed = bool(index % 2)
        ids = tokenizer.encode(text, add_special_tokens=False, allow_special=allowed)
        return ids == (special if allowed else plain)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(200)))


def test_loads_neither_torch_nor_transformers(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from appliance.tokenizer import Tokenizer\n"
        f"tokenizer = Tokenizer.from_path(Path({str(folder)!r}))\n"
        "tokenizer.encode_chat([{'role': 'user', 'content': 'hello'}])\n"
        "heavy = {'torch', 'transformers', 'numpy', 'gguf', 'huggingface_hub'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
