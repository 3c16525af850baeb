"""Tokens that a Lark grammar names, and texts that only look like such names."""

from __future__ import annotations

import pytest

from appliance.errors import RequestError
from appliance.server.requests.grammars import check_token_names

CONTROL = {"<|im_end|>", "<tool_call>"}


@pytest.mark.parametrize(
    "text",
    [
        'start: <tool_call> "<nope>" <|im_end|>',
        "start: <[0]> <[5-9]> <[1,3-9]> <[*]> <[^7]>",
        r'start: /[^<"\/]+<nope>/ "a \" <nope>"',
        'start: "a" // <nope>\n  | "b" # <nope>\n',
        'start: %json {"const": "<nope>"}',
    ],
)
def test_what_is_there_or_is_no_name_is_fine(text: str) -> None:
    check_token_names(text, CONTROL, 10)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('start: a\na: "x" <nope>', "line 2, column 8: this model has no control token <nope>"),
        ("start: <[10]>", "line 1, column 8: <[10]> is not among this model's token ids, 0 to 9"),
        ("start: <[2-12]>", "line 1, column 8: <[2-12]> is not among this model's token ids"),
        (f"start: <{'x' * 9000}>", "line 1, column 8: this model has no control token <xxx"),
    ],
)
def test_a_token_that_the_model_lacks_is_named_with_its_place(text: str, message: str) -> None:
    with pytest.raises(RequestError) as refused:
        check_token_names(text, CONTROL, 10)
    assert str(refused.value).startswith(message)
    assert len(str(refused.value)) < 600
