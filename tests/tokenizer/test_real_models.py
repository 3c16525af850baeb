"""Ids equal those that transformers gives for the same files; record_ids.py recorded them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from appliance.tokenizer import DecodeStream, Tokenizer

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "recorded_ids.json").read_text())

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Tokenizer:
    return Tokenizer.from_path(smollm2_gguf)


@pytest.fixture(scope="module")
def gemma3(gemma3_gguf: Path) -> Tokenizer:
    return Tokenizer.from_path(gemma3_gguf)


@pytest.fixture(params=["smollm2", "gemma3"])
def model(request: pytest.FixtureRequest) -> tuple[Tokenizer, dict[str, Any]]:
    return request.getfixturevalue(request.param), RECORDED[request.param]


def test_ids_of_texts(model: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer, recorded = model
    assert len(recorded["texts"]) > 20
    for text, with_special, as_text in recorded["texts"]:
        assert tokenizer.encode(text, add_special_tokens=True) == with_special, text
        ids = tokenizer.encode(text, add_special_tokens=False, allow_special=False)
        assert ids == as_text, text


def test_text_round_trips(model: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer, recorded = model
    for original, _, as_text in recorded["texts"]:
        # SentencePiece cannot distinguish a space from its own mark for one.
        text = original.replace("\u2581", " ") if tokenizer.vocab_size > 2**17 else original
        stream = DecodeStream(tokenizer)
        assert "".join(stream.push((i,)) for i in as_text) + stream.flush() == text
        assert tokenizer.decode(as_text) == text


def test_ids_of_chats(smollm2: Tokenizer) -> None:
    assert len(RECORDED["smollm2"]["chats"]) == 3
    for chat, ids in RECORDED["smollm2"]["chats"]:
        assert smollm2.encode_chat(chat) == ids


def test_what_the_files_say(smollm2: Tokenizer, gemma3: Tokenizer) -> None:
    assert (smollm2.vocab_size, smollm2.bos_token_id, smollm2.add_bos) == (49152, 1, False)
    assert smollm2.eos_token_ids == (2, 0)  # <|im_end|>, <|endoftext|>
    assert smollm2.chat_template is not None
    assert (gemma3.vocab_size, gemma3.bos_token_id, gemma3.add_bos) == (262144, 2, True)
    assert gemma3.eos_token_ids == (1, 106)  # <eos>, <end_of_turn>
    assert gemma3.chat_template is None
