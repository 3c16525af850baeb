"""Converts text to token ids and back: tokenizer, chat template, detokenizer, stop strings.

Runs in the API process, so it loads neither torch nor transformers. Names load on first use: a
process that only renders templates loads no tokenizer.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from appliance.tokenizer.chat_template import ChatTemplate
    from appliance.tokenizer.stream import DecodeStream, StopStringMatcher
    from appliance.tokenizer.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "DecodeStream", "StopStringMatcher", "Tokenizer"]

_HOME = {
    "ChatTemplate": "chat_template",
    "DecodeStream": "stream",
    "StopStringMatcher": "stream",
    "Tokenizer": "tokenizer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
