"""One name, one thing; and docstrings are sentences with a verb, not indirect questions.

The engine counts blocks. A page is their layout, which only the kernels know.
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
OPENING = re.compile(r"(What|Whether|How|Which|Where|Who|When|Why)\b")
ROOT = Path(__file__).parent.parent
ROOMS = ("appliance", "kernels", "quant", "tui")

MEANT_TWICE = {
    "TextDelta": "a wire message of the Responses API, and one of the Messages API",
}

# Names with "page" in the engine. All mean the kernels' layout, but for one of the system's.
PAGES_IN_ENGINE = {
    "PAGE_TOKENS",
    "kv_page",
    "KVPages",
    "on_pages",
    "PAGESIZE",
}


def modules(root: Path) -> Iterator[tuple[str, ast.Module]]:
    """Every module of the product under a root, by its path from there."""
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            inside = path.relative_to(root / room).parts
            # The package reaches the other rooms through symlinks as well.
            if not any((root / room / part).is_symlink() for part in inside):
                yield str(path.relative_to(root)), ast.parse(path.read_text())


def definitions(node: ast.AST) -> Iterator[ast.AST]:
    """A module and all that is defined in it; expressions are not looked into."""
    if isinstance(node, DOCUMENTED):
        yield node
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        statements = getattr(node, field, ())
        for statement in statements if isinstance(statements, list) else ():
            yield from definitions(statement)


@cache
def looked_through(root: Path) -> tuple[dict[str, set[str]], list[str]]:
    """What one reading of all modules finds.

    Returns:
        The modules that define each public class at their top level, by name of the class; and
        docstrings that open with a question word.
    """
    classes, questions = defaultdict(set), []
    for where, module in modules(root):
        for statement in module.body:
            if isinstance(statement, ast.ClassDef) and not statement.name.startswith("_"):
                classes[statement.name].add(where)
        for node in definitions(module):
            assert isinstance(node, DOCUMENTED)
            if OPENING.match((ast.get_docstring(node, clean=False) or "").lstrip()):
                questions.append(f"{where}: {getattr(node, 'name', 'the module')}")
    return classes, questions


def exported_classes(root: Path) -> dict[str, set[str]]:
    return looked_through(root)[0]


def indirect_questions(root: Path) -> list[str]:
    return looked_through(root)[1]


def names_of_pages(engine: Path) -> dict[str, str]:
    """Names with "page" in a folder's modules, each with a module that has it."""
    found = {}
    for path in sorted(engine.rglob("*.py")):
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                if token.type == tokenize.NAME and "page" in token.string.lower():
                    found[token.string] = str(path.relative_to(engine))
    return found


def duplicates(root: Path) -> dict[str, set[str]]:
    return {name: where for name, where in exported_classes(root).items() if len(where) > 1}


def test_a_class_name_means_one_thing() -> None:
    found = duplicates(ROOT)
    unexplained = {name: where for name, where in found.items() if name not in MEANT_TWICE}
    assert not unexplained, f"rename one of each, or give a reason in MEANT_TWICE: {unexplained}"
    assert not MEANT_TWICE.keys() - found.keys(), "MEANT_TWICE explains names that occur once"


def test_every_room_is_searched() -> None:
    rooms = {Path(where).parts[0] for places in exported_classes(ROOT).values() for where in places}
    assert rooms == set(ROOMS)


def test_a_second_class_of_a_name_is_found(tmp_path: Path) -> None:
    planted = {
        "appliance/engine/nouns/plan.py": "class Plan: ...",
        "quant/run/plan.py": "class Plan:\n    class Inner: ...",
        "kernels/work.py": "class _Plan: ...\nclass Inner: ...",
    }
    for name, text in planted.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "appliance" / "quant").symlink_to("../quant")
    assert duplicates(tmp_path) == {"Plan": {"appliance/engine/nouns/plan.py", "quant/run/plan.py"}}


def test_no_docstring_is_an_indirect_question() -> None:
    assert not indirect_questions(ROOT), "say it with a verb: Return, Count, Check"


def test_an_indirect_question_is_found(tmp_path: Path) -> None:
    (tmp_path / "tui").mkdir()
    planted = 'class Row:\n    """A row."""\n    def f(self):\n        """Whether it is."""'
    (tmp_path / "tui" / "row.py").write_text(planted)
    assert indirect_questions(tmp_path) == ["tui/row.py: f"]


def test_the_engine_says_blocks() -> None:
    found = names_of_pages(ROOT / "appliance" / "engine")
    others = {name: where for name, where in found.items() if name not in PAGES_IN_ENGINE}
    assert not others, f"a unit of the KV cache is a block; a page is its layout: {others}"
    assert not PAGES_IN_ENGINE - found.keys(), "PAGES_IN_ENGINE has names that do not occur"


def test_a_page_in_the_engine_is_found(tmp_path: Path) -> None:
    (tmp_path / "blocks").mkdir()
    (tmp_path / "blocks" / "pool.py").write_text("# of pages\nnum_open_pages = 3\n")
    assert names_of_pages(tmp_path) == {"num_open_pages": "blocks/pool.py"}
