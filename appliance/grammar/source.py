"""A grammar as llguidance wants it, and what it may cost. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llguidance import LLParserLimits, regex_to_lark

from appliance.grammar.grammar import GrammarKind, with_options

if TYPE_CHECKING:
    from appliance.grammar.grammar import Grammar

# A sequence's tokens are the model's own choice also where the text is determined: no other
# tokens of the same text are forced on it.
_HEAD = '%llguidance {"no_forcing": true}\n'


def source_of(grammar: Grammar) -> str:
    """The Lark grammar to be compiled."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return f"{_HEAD}start: %json {with_options(grammar.text)}"
        case GrammarKind.REGEX:
            return f"{_HEAD}start: /{regex_to_lark(grammar.text, '')}/"
        case GrammarKind.LARK:
            return _HEAD + grammar.text


def limits() -> LLParserLimits:
    """What compiling and each step may take; some milliseconds where a usual schema needs none."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,  # about 20 ms
        step_lexer_fuel=200_000,  # about 14 ms
        step_max_items=50_000,  # about 3 ms
        max_lexer_states=50_000,  # of 1 to 2 KB
        max_grammar_size=500_000,
        verbose_errors=False,  # they would tell of the prompt
    )
