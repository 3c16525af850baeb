"""Reads a model's thoughts and tool calls by the marks of its chat template.

Turns streamed text into parts: content, thoughts, calls. Knows no wire format, tokenizer or engine.
"""

from appliance.dialects.dialect import Dialect
from appliance.dialects.learn import learn_dialect
from appliance.dialects.parts import CallArguments, CallBegin, Content, Part, Thought
from appliance.dialects.reader import Reader

__all__ = [
    "CallArguments",
    "CallBegin",
    "Content",
    "Dialect",
    "Part",
    "Reader",
    "Thought",
    "learn_dialect",
]
