"""Translates a grammar for llguidance, and limits its cost. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llguidance import LLParserLimits, regex_to_lark

from appliance.grammar.grammar import GrammarKind, with_options

if TYPE_CHECKING:
    from appliance.grammar.grammar import Grammar


def source_of(grammar: Grammar, *, forces: bool = False) -> str:
    """Return the Lark grammar for the compiler.

    Args:
        forces: only the usual tokens of determined text are allowed; else the model chooses how
            to tokenize it.
    """
    head = f'%llguidance {{"no_forcing": {str(not forces).lower()}}}\n'
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return f"{head}start: %json {with_options(grammar.text)}"
        case GrammarKind.REGEX:
            return f"{head}start: /{regex_to_lark(grammar.text, '')}/"
        case GrammarKind.LARK:
            return head + grammar.text


def limits() -> LLParserLimits:
    """Limit compiling and each step: to milliseconds, far above a usual schema's needs."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,  # about 20 ms
        step_lexer_fuel=200_000,  # about 14 ms
        step_max_items=50_000,  # about 3 ms
        max_items_in_row=20_000,  # 4 for each optional property that may come next
        max_lexer_states=50_000,  # of 1 to 2 KB
        max_grammar_size=500_000,
        verbose_errors=False,  # they would reveal the prompt
    )
