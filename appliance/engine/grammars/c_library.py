"""Calls llguidance by its C functions, which work without the GIL. Imports no torch.

Its extension module exports them, as its header `llguidance.h` declares them. By its Python classes
a vocabulary of 152k tokens would hold the GIL for most of a second of a processor.
"""

from __future__ import annotations

import ctypes
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_bool,
    c_char_p,
    c_int32,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from llguidance import LLParserLimits, _lib

from appliance.engine.grammars.library import MASK_THREADS
from appliance.grammar.source import limits

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from appliance.engine.grammars.library import GrammarState, WordList


VERSION = b"llguidance@1."
MAX_FORCED = 512  # tokens asked for at once
_MAX_ERROR = 400  # bytes of a message


class CLibrary:
    """llguidance's C functions.

    Args:
        path: of the extension module; default: the installed one.

    Raises:
        MismatchError: they are missing, or take other parameters.
    """

    def __init__(self, path: str | None = None) -> None:
        self.functions = open_functions(path or _lib.__file__)
        self._helpers: ThreadPoolExecutor | None = None

    def read(self, words: WordList) -> CVocabulary:
        return CVocabulary(self.functions, words)

    def fill(self, rows: list[tuple[GrammarState, int]], words: NDArray[np.int32]) -> None:
        assert words.flags.c_contiguous
        start, size = words.ctypes.data, words.strides[0]
        pending = deque(cast("list[tuple[CState, int]]", rows))

        def work() -> None:
            while pending:
                with suppress(IndexError):  # another thread took the last one
                    state, index = pending.popleft()
                    state.fill(start + index * size, size)

        if self._helpers is None and len(rows) > 1:
            self._helpers = ThreadPoolExecutor(MASK_THREADS - 1, thread_name_prefix="masks")
        helping = [
            self._helpers.submit(work)
            for _ in range(min(len(rows), MASK_THREADS) - 1)
            if self._helpers is not None
        ]
        work()
        for helper in helping:
            if not helper.cancel():
                helper.result()


class CVocabulary:
    """A vocabulary that the library has read."""

    def __init__(self, functions: ctypes.CDLL, words: WordList) -> None:
        self.functions = functions
        self.ends = frozenset(words.ends)
        self._spell = Spell(_spelling(words.spell))  # the library calls it while this is here
        lengths = np.fromiter(map(len, words.tokens), np.uint32, len(words.tokens))
        more = np.array(words.ends[1:], np.uint32)
        slices = (c_char_p * (len(words.slices) + 1))(*map(str.encode, words.slices))
        fields = VocabularyFields(
            struct_size=ctypes.sizeof(VocabularyFields),
            vocab_size=len(words.tokens),
            tok_eos=words.ends[0],
            token_lens=lengths.ctypes.data,
            token_bytes=b"".join(words.tokens),
            tokenize_assumes_string=True,
            tokenize_fn=self._spell,
            slices=slices,
            tok_eos_extra=more.ctypes.data,
            tok_eos_extra_count=len(more),
        )
        error = ctypes.create_string_buffer(_MAX_ERROR)
        self._pointer = functions.llg_new_tokenizer_v2(byref(fields), error, _MAX_ERROR)
        if not self._pointer:
            raise ValueError(f"llguidance cannot read the vocabulary: {in_text(error.value)}")

    def __del__(self) -> None:
        self.functions.llg_free_tokenizer(self._pointer)

    def compile(self, source: str) -> CState:
        chosen = limits()
        fields = GrammarFields(
            tokenizer=self._pointer,
            limits=LimitFields(*(getattr(chosen, name) for name in names_of(LimitFields))),
        )
        matcher = self.functions.llg_new_matcher(byref(fields), b"lark", source.encode())
        return CState(self, matcher)


class CState:
    """A grammar after some tokens; see `GrammarState`. One thread at a time may use it."""

    __slots__ = ("_pointer", "_vocabulary")

    def __init__(self, vocabulary: CVocabulary, pointer: int) -> None:
        self._vocabulary = vocabulary
        self._pointer = pointer

    def __del__(self) -> None:
        self.functions.llg_free_matcher(self._pointer)

    @property
    def functions(self) -> ctypes.CDLL:
        return self._vocabulary.functions

    def deep_copy(self) -> CState:
        return CState(self._vocabulary, self.functions.llg_clone_matcher(self._pointer))

    def is_error(self) -> bool:
        return bool(self.functions.llg_matcher_is_error(self._pointer))

    def get_error(self) -> str:
        return in_text(self.functions.llg_matcher_get_error(self._pointer) or b"")

    def is_accepting(self) -> bool:
        return bool(self.functions.llg_matcher_is_accepting(self._pointer))

    def is_stopped(self) -> bool:
        return bool(self.functions.llg_matcher_is_stopped(self._pointer))

    def consume_token(self, token_id: int, /) -> bool:
        if token_id in self._vocabulary.ends and self.is_stopped():
            return True
        return self.consume_tokens([token_id])

    def consume_tokens(self, token_ids: list[int], /) -> bool:
        return self._of_tokens("llg_matcher_consume_tokens", token_ids) == 0

    def validate_tokens(self, token_ids: list[int], /) -> int:
        return max(self._of_tokens("llg_matcher_validate_tokens", token_ids), 0)

    def rollback(self, count: int, /) -> bool:
        return bool(self.functions.llg_matcher_rollback(self._pointer, count) == 0)

    def compute_ff_tokens(self) -> list[int]:
        found = (c_uint32 * MAX_FORCED)()
        count = self.functions.llg_matcher_compute_ff_tokens(self._pointer, found, MAX_FORCED)
        return found[: max(count, 0)]

    def fill(self, address: int, size: int) -> None:
        """Write the mask of `size` bytes to memory, unless this is in error."""
        code = self.functions.llg_matcher_compute_mask_into(self._pointer, address, size)
        assert code == 0 or self.is_error(), "a mask has another size than its row"

    def _of_tokens(self, function: str, token_ids: list[int]) -> int:
        count = len(token_ids)
        found: int = getattr(self.functions, function)(
            self._pointer, (c_uint32 * count)(*token_ids), count
        )
        return found


def _spelling(spell: Callable[[bytes], list[int]]) -> Callable[..., int]:
    """Return the library's callback: it writes as many tokens as fit, and returns their number."""

    def write(_: Any, text: Any, length: int, found: Any, room: int) -> int:
        token_ids = spell(text[:length])
        for index, token_id in enumerate(token_ids[:room]):
            found[index] = token_id
        return len(token_ids)

    return write


Spell = ctypes.CFUNCTYPE(
    c_size_t, c_void_p, POINTER(ctypes.c_char), c_size_t, POINTER(c_uint32), c_size_t
)


class VocabularyFields(Structure):
    """`LlgTokenizerInitV2`: by its size the library knows which fields there are."""

    _fields_ = (
        ("struct_size", c_size_t),
        ("vocab_size", c_uint32),
        ("tok_eos", c_uint32),
        ("token_lens", c_void_p),
        ("token_bytes", c_char_p),
        ("tokenizer_json", c_char_p),
        ("tokenize_assumes_string", c_bool),
        ("tokenize_fn", Spell),
        ("use_approximate_greedy_tokenize_fn", c_bool),
        ("tokenize_user_data", c_void_p),
        ("slices", POINTER(c_char_p)),
        ("tok_eos_extra", c_void_p),
        ("tok_eos_extra_count", c_uint32),
    )


class LimitFields(Structure):
    """`LlgParserLimits`, by the names of `LLParserLimits`."""

    _fields_ = (
        ("max_items_in_row", c_size_t),
        ("initial_lexer_fuel", c_uint64),
        ("step_lexer_fuel", c_uint64),
        ("step_max_items", c_size_t),
        ("max_lexer_states", c_size_t),
        ("max_grammar_size", c_size_t),
        ("precompute_large_lexemes", c_bool),
        ("verbose_errors", c_bool),
    )


class GrammarFields(Structure):
    """`LlgConstraintInit`."""

    _fields_ = (
        ("tokenizer", c_void_p),
        ("log_buffer_level", c_uint32),
        ("log_stderr_level", c_uint32),
        ("ff_tokens_ok", c_bool),
        ("backtrack_ok", c_bool),
        ("limits", LimitFields),
    )


_POINTERS, _SIZE = POINTER(c_uint32), c_size_t
FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {  # what it returns, and takes
    "llg_get_version": (c_char_p, ()),
    "llg_constraint_init_set_defaults": (None, (c_void_p, c_void_p)),
    "llg_new_tokenizer_v2": (c_void_p, (POINTER(VocabularyFields), c_char_p, c_size_t)),
    "llg_free_tokenizer": (None, (c_void_p,)),
    "llg_new_matcher": (c_void_p, (POINTER(GrammarFields), c_char_p, c_char_p)),
    "llg_clone_matcher": (c_void_p, (c_void_p,)),
    "llg_free_matcher": (None, (c_void_p,)),
    "llg_matcher_get_error": (c_char_p, (c_void_p,)),
    "llg_matcher_is_error": (c_bool, (c_void_p,)),
    "llg_matcher_is_accepting": (c_bool, (c_void_p,)),
    "llg_matcher_is_stopped": (c_bool, (c_void_p,)),
    "llg_matcher_compute_mask_into": (c_int32, (c_void_p, c_void_p, c_size_t)),
    "llg_matcher_consume_tokens": (c_int32, (c_void_p, _POINTERS, c_size_t)),
    "llg_matcher_validate_tokens": (c_int32, (c_void_p, _POINTERS, c_size_t)),
    "llg_matcher_compute_ff_tokens": (c_int32, (c_void_p, _POINTERS, c_size_t)),
    "llg_matcher_rollback": (c_int32, (c_void_p, c_size_t)),
}


def open_functions(path: str) -> ctypes.CDLL:
    """Open the library and declare its functions, if they are those that are called here."""
    try:
        functions = ctypes.CDLL(path)
        for name, (returns, takes) in FUNCTIONS.items():
            function = getattr(functions, name)
            function.restype, function.argtypes = returns, takes
    except (OSError, AttributeError) as error:
        raise MismatchError(f"llguidance has no C functions ({error})") from error
    version = functions.llg_get_version()
    if not version.startswith(VERSION):
        raise MismatchError(f"llguidance is {in_text(version)}, not of version 1")
    if not _layout_fits(functions):
        raise MismatchError(f"the parameters of {in_text(version)} are not laid out as known")
    return functions


def _layout_fits(functions: ctypes.CDLL) -> bool:
    """Compare the defaults that the library writes to our fields with those of its Python class."""
    size, defaults = ctypes.sizeof(GrammarFields), LLParserLimits()
    for byte in (0x00, 0xFF):
        memory = bytearray([byte]) * (2 * size)
        room = (ctypes.c_char * len(memory)).from_buffer(memory)
        functions.llg_constraint_init_set_defaults(room, None)
        found = GrammarFields.from_buffer(memory)
        same = all(
            getattr(found.limits, name) == getattr(defaults, name) for name in names_of(LimitFields)
        )
        flags = (found.tokenizer, found.ff_tokens_ok, found.backtrack_ok)
        if not same or any(flags) or memory[size:] != bytes([byte]) * size:
            return False
    return True


def names_of(fields: type[Structure]) -> list[str]:
    return [name for name, *_ in fields._fields_]


def in_text(message: bytes) -> str:
    return message.decode(errors="replace")


class MismatchError(Exception):
    """The installed llguidance has other C functions than are called here."""
