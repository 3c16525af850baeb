"""The C functions of llguidance that are called, as its header `llguidance.h` declares them."""

from __future__ import annotations

import ctypes
from ctypes import (
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_int32,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

from llguidance import LLParserLimits

VERSION = b"llguidance@1."

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
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {  # what it returns, and takes
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


class MismatchError(Exception):
    """The installed llguidance has other C functions than are called here."""


def open_functions(path: str) -> ctypes.CDLL:
    """Open the library and declare its functions, if they are those that are called here."""
    try:
        functions = ctypes.CDLL(path)
        for name, (returns, takes) in _FUNCTIONS.items():
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
