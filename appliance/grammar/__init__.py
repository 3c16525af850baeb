"""Constraints on the text of an answer: schemas, expressions and grammars."""

from appliance.grammar.grammar import Grammar, GrammarKind

__all__ = ["Grammar", "GrammarKind"]
