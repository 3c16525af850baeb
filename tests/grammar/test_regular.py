"""Grammars as expressions: they match the texts that llguidance accepts for the grammar itself."""

from __future__ import annotations

import re

import pytest
from llguidance import LLMatcher, LLTokenizer

from appliance.errors import RequestError
from appliance.grammar.regular import MAX_TEXT, regular

# The grammar that Codex sends with its patches has this form.
PATCH = r"""
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: add | "*** Delete File: " filename LF | update
add: "*** Add File: " filename LF line+
update: "*** Update File: " filename LF change?
filename: /(.+)/
line: "+" /(.*)/ LF -> line
change: (context | ("+" | "-" | " ") /(.*)/ LF)+
context: ("@@" | "@@ " /(.+)/) LF
%import common.LF
"""
HEAD, TAIL = "*** Begin Patch\n", "*** End Patch"
CASES: list[tuple[str, list[str], list[str]]] = [
    (
        PATCH,
        [f'{HEAD}*** Add File: a\n+x = "\\n"\n+\n{TAIL}\n',
         f"{HEAD}*** Update File: a b\n@@ f\n-a\n+🎈\n*** Delete File: b\n{TAIL}"],
        [f"{HEAD}{TAIL}", f"{HEAD}*** Add File: \n+x\n{TAIL}", f"{HEAD}*** Add File: a\nx\n{TAIL}"],
    ),
    (
        "start: e\n?e: t (SP OP SP t)*  // a sum\nt: INT | NAME\nOP: \"+\" | \"-\"\nSP: \" \"\n"
        "NAME: /[a-z]+/i\n%import common.INT",
        ["1 + ab - C", "7"],
        ["1 +2", "1 + ", "+"],
    ),
    (
        'start: list\nlist: item | list "," item\nitem: "a".."c"~2..3\n%ignore /[ \\t]+/',
        ["ab", "ab,cab", "ab , bca "],
        ["a", "ab,", "ab ab", "abcab"],
    ),
    ('start: a\na: "x" a | "y"i', ["xxy", "Y"], ["x", "yx"]),
    ('start: ["a"] ("b" | "c"){2} "\\u00e9" /d\\/[.]./', ["abcéd/.x", "cbéd/.."], ["abéd/.x"]),
    ("start: /a.b/s /./\n", ["a\nbc"], ["a\nb\n", "ab"]),
    (
        "start: NUMBER WS ESCAPED_STRING\n%import common (NUMBER, ESCAPED_STRING)\n"
        "%import common.WS -> WS",
        ['1.5e3 "a\\"b"', '.5\n""'],
        ['1 "a', '1"a"'],
    ),
]  # fmt: skip


def reads(grammar: str, text: str) -> bool:
    """Whether llguidance accepts a text for the grammar; its tokens are bytes."""
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(("grammar", "right", "wrong"), CASES)
def test_texts_are_those_of_the_grammar(grammar: str, right: list[str], wrong: list[str]) -> None:
    pattern = regular(grammar)
    for texts, expected in ((right, True), (wrong, False)):
        for text in texts:
            assert reads(grammar, text) is expected, text
            assert bool(re.fullmatch(pattern, text)) is expected, text
            schema = {"type": "string", "pattern": f"^(?:{pattern})$"}
            matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_json_schema(schema))
            assert not matcher.is_error(), matcher.get_error()


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ('start: "(" start ")" | "x"', "start nests in itself"),
        ('start: a\na: b "x"\nb: "[" a "]" | "y"', "nests in itself"),
        ("start: x", "no rule x"),
        ('a: "b"', "no rule start"),
        ("start: %json {}", "%json"),
        ("start: <think>", "<think>"),
        ('%declare X\nstart: "a"', "%declare"),
        ("%import common.FOO\nstart: FOO", "FOO cannot be imported"),
        ("start: /a)|(b/", "parenthesis"),
        ('start: ("a"', "instead of )"),
        ('start: "a"\nstart: "b"', "twice"),
        ("start: /a b/x", "flag x"),
        ('start: "a" ' + "x" * MAX_TEXT, "more than"),
        ("\n".join(['start: a0', *(f"a{n}: a{n + 1} a{n + 1}" for n in range(40)), 'a40: "x"']),
         "too large"),
        ("\n".join(["start: a0", *(f'a{n}: a{n + 1} "{"y" * 900}"' for n in range(60)), "a60:"]),
         "too large"),
        ("start: " + "(" * 5000 + '"a"' + ")" * 5000, "too deeply"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_out_is_refused(grammar: str, why: str) -> None:
    with pytest.raises(RequestError) as error:
        regular(grammar)
    assert why in error.value.message
