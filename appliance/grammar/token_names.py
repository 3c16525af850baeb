"""Checks the tokens that a Lark grammar names, such as `<tool_call>` and `<[151657]>`."""

from __future__ import annotations

import re
from collections.abc import Collection

from appliance.errors import RequestError

# The first match wins, so names inside texts, expressions and comments do not count.
# What is not closed counts up to the line's end, so that no character is read twice, and nothing
# is given back (`++`), so that `re` remembers no place to go back to for each character.
_NAMES = re.compile(
    r""" "(?:\\.|[^"\\\n]++)*+"? | //[^\n]* | \#[^\n]* | /(?:\\.|[^/\\\n]++)++/?
    | (?P<name><[^<>\s]+>) """,
    re.VERBOSE,
)
_NUMBERS = re.compile(r"<\[(\^?[0-9,-]+)\]>")


def check_token_names(text: str, control: Collection[str], vocab_size: int) -> None:
    """Check that a model has the tokens that a Lark grammar names.

    Args:
        text: of a well-formed grammar.
        control: texts of the model's control tokens.
        vocab_size: number of ids.

    Raises:
        RequestError: it lacks one; the message has the place.
    """
    for found in _NAMES.finditer(text):
        name = found["name"]
        if name is None or name in control or name == "<[*]>":
            continue
        if numbers := _NUMBERS.fullmatch(name):
            if all(int(number) < vocab_size for number in re.findall(r"\d+", numbers[1])):
                continue
            problem = f"{name} is not among this model's token ids, 0 to {vocab_size - 1}"
        else:
            problem = f"this model has no control token {name}"
        line = text.count("\n", 0, found.start()) + 1
        column = found.start() - text.rfind("\n", 0, found.start())
        raise RequestError(f"line {line}, column {column}: {problem[:400]}")
