"""What an answer must look like: one noun for schemas, expressions and grammars."""

from appliance.grammar.grammar import Grammar, GrammarKind

__all__ = ["Grammar", "GrammarKind"]
