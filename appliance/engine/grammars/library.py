"""Reads vocabularies, compiles grammars and makes masks with llguidance. Imports no torch."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol, Self, cast

from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.numpy import fill_next_token_bitmask_par

from appliance.grammar.source import limits

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Sequences

    import numpy as np
    from numpy.typing import NDArray

MASK_THREADS = 2
_SPECIAL = b"\xff"  # in front of the name of a token that no text contains

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WordList:
    """A vocabulary for the library.

    Attributes:
        tokens: bytes by token id, those of special tokens marked; a mask has a bit for each.
        ends: ids of tokens that end an answer, at least one.
        spell: returns the likeliest tokens of a text.
        slices: expressions, each for tokens that masks allow together; a tree by containment.
    """

    tokens: list[bytes]
    ends: list[int]
    spell: Callable[[bytes], list[int]]
    slices: Sequences[str]

    def __post_init__(self) -> None:
        assert self.ends
        assert len(self.tokens) % 32 == 0, "masks come in whole words"


def special(name: bytes) -> bytes:
    """Mark the name of a token that no text contains."""
    return name if name.startswith(_SPECIAL) else _SPECIAL + name


class GrammarState(Protocol):
    """A grammar after some tokens; llguidance's `LLMatcher` documents the methods."""

    def deep_copy(self) -> Self: ...

    def is_error(self) -> bool: ...

    def get_error(self) -> str: ...

    def is_accepting(self) -> bool: ...

    def is_stopped(self) -> bool: ...

    def consume_token(self, token_id: int, /) -> bool: ...

    def consume_tokens(self, tokens: list[int], /) -> bool: ...

    def rollback(self, num_tokens: int, /) -> bool: ...

    def validate_tokens(self, tokens: list[int], /) -> int: ...

    def compute_ff_tokens(self) -> list[int]: ...


class ReadVocabulary(Protocol):
    """A vocabulary that the library has read."""

    def compile(self, source: str) -> GrammarState:
        """Compile a grammar in Lark's notation; a bad one is a state in error."""


class GrammarLibrary(Protocol):
    """One of two ways to call llguidance."""

    def read(self, words: WordList) -> ReadVocabulary: ...

    def fill(self, rows: list[tuple[GrammarState, int]], words: NDArray[np.int32]) -> None:
        """Write the masks of some states to rows of (num_rows, words of a mask), without the GIL.

        After an error a row is left as it is, or allows the end.
        """


@dataclass(frozen=True, slots=True)
class _Wrapper:
    """llguidance's tokenizer interface."""

    tokens: list[bytes]
    eos_token_id: int
    spell: Callable[[bytes], list[int]]
    special_token_ids: tuple[int, ...] = ()  # marked before
    bos_token_id: int | None = None
    is_tokenizer_wrapper: bool = True

    def __call__(self, text: str) -> list[int]:
        return self.spell(text.encode())


@dataclass(frozen=True, slots=True)
class _PythonVocabulary:
    tokenizer: LLTokenizer

    def compile(self, source: str) -> GrammarState:
        return LLMatcher(self.tokenizer, source, log_level=0, limits=limits())


class PythonLibrary:
    """llguidance's Python classes, which hold the GIL while they read a vocabulary."""

    def __init__(self) -> None:
        self._executor = LLExecutor(MASK_THREADS)

    def read(self, words: WordList) -> ReadVocabulary:
        wrapper = _Wrapper(words.tokens, words.ends[0], words.spell)
        return _PythonVocabulary(
            LLTokenizer(
                cast("TokenizerWrapper", wrapper), eos_token=words.ends, slices=[*words.slices]
            )
        )

    def fill(self, rows: list[tuple[GrammarState, int]], words: NDArray[np.int32]) -> None:
        fill_next_token_bitmask_par(
            self._executor, cast("list[tuple[LLMatcher, int]]", rows), words
        )


@cache
def open_library() -> GrammarLibrary:
    """Return the C functions; the Python classes where this version has other ones."""
    from appliance.engine.grammars.c_library import CLibrary, MismatchError

    try:
        return CLibrary()
    except MismatchError as error:
        logger.warning(
            "running requests stand still while the first grammar is prepared: %s", error
        )
        return PythonLibrary()
