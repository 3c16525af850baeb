"""Converts vocabulary entries to bytes, in the three spellings in use."""

from __future__ import annotations

import re
from enum import Enum

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
SPACE_MARK = "\u2581"  # SentencePiece's space
_CONTINUED = "##"  # WordPiece's mark


class Spelling(Enum):
    BYTE_LEVEL = "byte-level"  # each byte is one printable character (GPT-2)
    SENTENCEPIECE = "sentencepiece"  # plain text, spaces marked, odd bytes as <0xXX>
    WORDPIECE = "wordpiece"  # plain text, the continuation of a word marked (BERT)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes map to themselves, the others to U+0100 and up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
_LETTER_OF = {byte: letter for letter, byte in _BYTE_OF.items()}


def bytes_in_letters(token: bytes) -> str:
    """Spell bytes as a byte-level vocabulary does."""
    return "".join(_LETTER_OF[byte] for byte in token)


def piece_bytes(piece: str, spelling: Spelling) -> bytes:
    """Return the bytes of an entry other than an added token."""
    if spelling is Spelling.BYTE_LEVEL:
        return b"".join(
            bytes((_BYTE_OF[c],)) if c in _BYTE_OF else c.encode("utf-8", "replace") for c in piece
        )
    if spelling is Spelling.WORDPIECE:
        inner = piece.removeprefix(_CONTINUED)
        return (inner if inner != piece else f" {piece}").encode()
    if match := _BYTE_TOKEN.fullmatch(piece):
        return bytes.fromhex(match[1])
    return piece.replace(SPACE_MARK, " ").encode()
