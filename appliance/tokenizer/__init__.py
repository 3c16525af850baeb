"""Converts text to token ids and back: tokenizer, chat template, detokenizer, stop strings.

Loads neither torch nor transformers: this runs in the API process.
"""

from appliance.tokenizer.chat_template import ChatTemplate
from appliance.tokenizer.stop_strings import StopStringMatcher
from appliance.tokenizer.stream import DecodeStream
from appliance.tokenizer.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "DecodeStream", "StopStringMatcher", "Tokenizer"]
