"""The tokens that a Lark grammar names, as `<tool_call>` and `<[151657]>`, and those there are."""

from __future__ import annotations

import re
from collections.abc import Collection

from appliance.errors import RequestError

# Whatever comes first counts, so that a name within a text, an expression or a comment is none.
_NAMES = re.compile(
    r""" "(?:\\.|[^"\\\n])*" | //[^\n]* | \#[^\n]* | /(?:\\.|[^/\\\n])+/ | (?P<name><[^<>\s]+>) """,
    re.VERBOSE,
)
_NUMBERS = re.compile(r"<\[(\^?[0-9,-]+)\]>")


def check_token_names(text: str, control: Collection[str], vocab_size: int) -> None:
    """Check that a model has the tokens that a Lark grammar names.

    Args:
        text: of the grammar, which is well-formed.
        control: texts of the model's control tokens.
        vocab_size: ids that there are.

    Raises:
        RequestError: it lacks one; the message says where it is named.
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
