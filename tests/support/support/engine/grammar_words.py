"""A vocabulary for the tiny model, which has no tokenizer: bytes, and words of JSON."""

from __future__ import annotations

from itertools import product

from appliance.engine.nouns.messages import Vocabulary

SIZE = 512
EOS = 2
FIRST_BYTE = 3
CALL = 259  # stands for "<call>", which no text contains
_WORDS = ['{"', '":', '": ', '", "', '"}', "[", "[]", "{}", "true", "false", "null", "\n", "  "]


def words() -> Vocabulary:
    """Token 3 + b is byte b; 0 to 2 and `CALL` are control tokens."""
    tokens = [b"<unk>", b"<bos>", b"<eos>", *(bytes((byte,)) for byte in range(256)), b"<call>"]
    tokens += [word.encode() for word in _WORDS]
    pairs = ("".join(pair).encode() for pair in product("abcdeirst0123456789", repeat=2))
    tokens += [next(pairs) for _ in range(SIZE - len(tokens))]
    return Vocabulary(tuple(tokens), (0, 1, 2, CALL), in_order=True)


def text_of(token_ids: list[int]) -> str:
    """What an answer says, without the token that ends it."""
    tokens = words().tokens
    return b"".join(tokens[token_id] for token_id in token_ids if token_id != EOS).decode(
        errors="backslashreplace"
    )
