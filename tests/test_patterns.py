"""No expression of ours is slow on any text, and no stranger's expression reaches `re`.

`re` backtracks and cannot be stopped: an expression such as `(0+s?)+` takes hours for forty
characters. Each expression in the product is tried on texts made of its own parts, which begin
well, repeat something and end badly.
"""

from __future__ import annotations

import ast
import re
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("appliance", "kernels", "quant", "tui")
FLAGS = {name: int(getattr(re, name)) for name in re.RegexFlag.__members__}
METHODS = ("search", "match", "fullmatch", "split", "findall", "finditer", "sub", "subn")
COMPILERS = {*METHODS, "compile"}
# Words of a file that uses or imports an expression; no other file is parsed. `split` is mostly
# that of strings.
USES = re.compile(
    r"\b(re|regex|fnmatch)\b|\.(search|match|fullmatch|findall|finditer|subn?)\b|[A-Z]\.split\b"
)
# Characters, and processor seconds for them: the first sizes find 2**n before it would take for
# ever, and with the last ones n**2 takes two seconds or more.
SHORT = ((16, 0.01), (24, 0.02), (512, 0.1))
LONG = ((8 * 1024, 0.1), (64 * 1024, 0.3))

# Expressions that are built at run time, by file and source code.
MADE = {
    ("appliance/dialects/source.py", "'|'.join(map(re.escape, markers)) or '(?!)'"): "plain texts",
    ("appliance/tokenizer/control_tokens.py", "self._nonce + '(\\\\d+)Z'"): "letters and digits",
    ("appliance/doctor/redaction.py", "f'(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])'"): (
        "a plain text"
    ),
    (
        "appliance/doctor/model_contents.py",
        """f"[: ]{re.escape(key.partition('.')[2] or key)}\\\\b\"""",
    ): "a plain text",
    ("appliance/engine/tiers/stored_models.py", "'([0-9a-f]{32}(?:73)?)' + re.escape(SUFFIX)"): (
        "a plain text of ours"
    ),
    ("appliance/server/anthropic/turns.py", "name"): "a key of a table there",
    ("appliance/model/gguf_tensors.py", "p"): "of a table there",
    ("appliance/model/fallback/gguf_classes.py", "pattern"): "of a table there",
    ("appliance/model/fallback/description.py", "pattern"): "of a class, whose code runs anyway",
}


class Expression(NamedTuple):
    """An expression in the source, and the methods that use it."""

    place: str
    text: str | bytes
    flags: int
    methods: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.place} {self.text!r}"


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Yield the files that may use an expression, and their content."""
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            inside = path.relative_to(ROOT / room).parts
            if not any((ROOT / room / part).is_symlink() for part in inside):
                text = path.read_text()
                if USES.search(text):
                    yield str(path.relative_to(ROOT)), ast.parse(text)


def imported(node: ast.AST) -> list[str]:
    """Return modules that a statement imports, with a name of each for `from`."""
    if isinstance(node, ast.Import):
        return [one.name for one in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{one.name}" for one in node.names]
    return []


def constant(node: ast.expr) -> str | bytes | None:
    try:
        found = ast.literal_eval(node)
    except ValueError:
        return None
    return found if isinstance(found, str | bytes) else None


def flags_of(call: ast.Call) -> int:
    names = {n.attr for one in [*call.args, *call.keywords] for n in ast.walk(one)
             if isinstance(n, ast.Attribute)}  # fmt: skip
    found = 0
    for name in names & FLAGS.keys():
        found |= FLAGS[name]
    return found


def expressions() -> tuple[list[Expression], set[tuple[str, str]]]:
    """Return all expressions, and those that are built at run time by file and code."""
    uses: defaultdict[tuple[str, str], set[str]] = defaultdict(set)  # methods by file and name
    plain: list[tuple[str, str | bytes, int, str]] = []
    made = set()
    for file, tree in sources():
        targets = {
            id(node.value): target.id
            for node in ast.walk(tree) if isinstance(node, ast.Assign)
            for target in node.targets if isinstance(target, ast.Name)
        }  # fmt: skip
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in METHODS:
                name = ast.unparse(node.value).rpartition(".")[2]
                uses[file, name].add(node.attr)
                uses["", name].add(node.attr)
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if ast.unparse(node.func.value) != "re" or node.func.attr not in COMPILERS:
                continue
            text = constant(node.args[0])
            if text is None:
                made.add((file, ast.unparse(node.args[0])))
                continue
            by = node.func.attr
            name = targets.get(id(node), "") if by == "compile" else by
            plain.append((file, text, flags_of(node), name))
    found = []
    for file, text, flags, name in plain:
        used = {name} if name in METHODS else uses[file, name] or uses["", name]
        found.append(Expression(file, text, flags, tuple(sorted(used)) or METHODS[:3]))
    return found, made


# ---- texts that an expression begins to match ----

CATEGORIES = {
    codes.CATEGORY_DIGIT: "0", codes.CATEGORY_SPACE: " ", codes.CATEGORY_WORD: "a",
    codes.CATEGORY_NOT_DIGIT: "a", codes.CATEGORY_NOT_SPACE: "a", codes.CATEGORY_NOT_WORD: "-",
}  # fmt: skip
REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT)
COMMON = 'a0 \n-\\"'
ENDS = ("", "\0")


def characters(items: Iterable[tuple[Any, Any]]) -> Iterator[str]:
    """Yield the characters that items of a class, or literals, name."""
    for op, value in items:
        if op in (codes.LITERAL, codes.NOT_LITERAL):
            yield chr(value)
        elif op is codes.RANGE:
            yield from map(chr, value)
        elif op is codes.CATEGORY:
            yield CATEGORIES.get(value, "a")


def example(items: Iterable[tuple[Any, Any]]) -> str:
    """Return a short text made of an expression's parts."""
    found = ""
    for op, value in items:
        if op is codes.LITERAL:
            found += chr(value)
        elif op is codes.IN:
            named = [*characters(value)]
            if value[0][0] is codes.NEGATE:
                found += next(one for one in "a0 -;" if one not in named)
            else:
                found += named[0]
        elif op in (codes.ANY, codes.NOT_LITERAL):
            found += "a"
        elif op is codes.BRANCH:
            found += example(value[1][0])
        elif op is codes.SUBPATTERN:
            found += example(value[3])
        elif op is codes.ATOMIC_GROUP:
            found += example(value)
        elif op in REPEATS:
            found += example(value[2]) * max(1, min(value[0], 40))
    return found


def walk(items: Iterable[tuple[Any, Any]], before: str) -> Iterator[tuple[str, str, set[str]]]:
    """Yield the text before each repetition, the repeated text, and its characters."""
    for op, value in items:
        if op in REPEATS:
            if value[1] > LONG[0][0]:
                yield before, example(value[2]), set(named(value[2]))
            yield from walk(value[2], before)
        elif op is codes.SUBPATTERN:
            yield from walk(value[3], before)
        elif op is codes.ATOMIC_GROUP:
            yield from walk(value, before)
        elif op is codes.BRANCH:
            for branch in value[1]:
                yield from walk(branch, before)
        before += example([(op, value)])


def named(items: Iterable[tuple[Any, Any]]) -> Iterator[str]:
    """Yield the characters that an expression names anywhere."""
    for op, value in items:
        yield from characters([(op, value)])
        if op is codes.IN:
            yield from characters(value)
        elif op is codes.BRANCH:
            for branch in value[1]:
                yield from named(branch)
        elif op is codes.SUBPATTERN:
            yield from named(value[3])
        elif op is codes.ATOMIC_GROUP:
            yield from named(value)
        elif op in REPEATS:
            yield from named(value[2])
        elif op in (codes.ASSERT, codes.ASSERT_NOT):
            yield from named(value[1])


def nasty(expression: Expression) -> set[tuple[str, str, str]]:
    """Return beginnings, texts to repeat after each, and ends."""
    text = expression.text
    parsed = parser.parse(text if isinstance(text, str) else text.decode("latin-1"),
                          expression.flags)  # fmt: skip
    letters = [*COMMON, *sorted({*named(parsed)} - {*COMMON})][:24]
    found = set()
    for before, repeated, own in walk(parsed, ""):
        pumps = {repeated, *letters, *map("".join, product(sorted(own)[:5], repeat=2))}
        for begin, pump, end in product((before, before + repeated), pumps, ENDS):
            found.add((begin, pump, end))
            found.add(("", begin + pump, end))
    return {one for one in found if one[1]}


def seconds(expression: Expression, parts: tuple[str, str, str], size: int) -> float:
    """Return the processor seconds for one text, by the slowest method."""
    begin, pump, end = parts
    whole = begin + pump * (size // len(pump)) + end
    text: Any = whole if isinstance(expression.text, str) else whole.encode()
    compiled: Any = re.compile(expression.text, expression.flags)
    slowest = 0.0
    for method in expression.methods:
        call = getattr(compiled, method)
        arguments = (text[:0], text) if method in ("sub", "subn") else (text,)
        started = time.thread_time()
        found = call(*arguments)
        if method == "finditer":
            deque(found, maxlen=0)
        slowest = max(slowest, time.thread_time() - started)
    return slowest


def slow_text(expression: Expression) -> str | None:
    """Return the kind of text for which an expression is slow; None if there is none."""

    def is_slow(parts: tuple[str, str, str], size: int, limit: float) -> bool:
        # If it is fast the second time, only the machine was busy.
        return all(seconds(expression, parts, size) > limit for _ in range(2))

    took = []
    for parts in nasty(expression):
        for size, limit in SHORT:
            if is_slow(parts, size, limit):
                return f"{parts} of {size} characters"
        took.append((seconds(expression, parts, SHORT[-1][0]), parts))
    for _, parts in sorted(took, reverse=True)[:8]:
        for size, limit in LONG:
            if is_slow(parts, size, limit):
                return f"{parts} of {size} characters"
    return None


EXPRESSIONS, RUN_TIME = expressions()


def test_no_expression_is_made_of_a_strangers_text() -> None:
    """`regex` matches an adapter's expressions, with a time limit; Rust matches the grammars'."""
    assert MADE.keys() == RUN_TIME
    importers = {
        (file, name)
        for file, tree in sources()
        for node in ast.walk(tree)
        for name in imported(node)
        if name.partition(".")[0] in ("re", "regex", "fnmatch") and name != "re"
    }
    assert importers == {("appliance/model/adapters/peft_settings.py", "regex")}


@pytest.mark.parametrize("file", sorted({one.place for one in EXPRESSIONS}))
def test_no_text_takes_an_expression_long(file: str) -> None:
    found = {str(one): slow_text(one) for one in EXPRESSIONS if one.place == file}
    assert not (slow := {one: why for one, why in found.items() if why}), slow
