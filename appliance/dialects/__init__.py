"""Reads a model's thoughts and tool calls by the marks of its chat template.

Turns streamed text into parts: content, thoughts, calls. Knows no wire format, tokenizer or engine.
"""

from appliance.dialects.dialect import Dialect, Reader
from appliance.dialects.learn import learn_dialect
from appliance.dialects.output import CallArguments, CallBegin, Content, Part, Thought

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
