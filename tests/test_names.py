"""One name, one thing; docstrings have a verb; and tests touch no private name of ours.

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
from typing import NamedTuple

OPENING = re.compile(r"(What|Whether|How|Which|Where|Who|When|Why)\b")
DEFINED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, *DEFINED)
PRIVATE = re.compile(r"_(?!_)\w+")
SUSPECT = re.compile(r"""[."' ](_(?!_)\w+)""")  # perhaps a private name that is touched
ROOT = Path(__file__).parent.parent
ROOMS = ("appliance", "kernels", "quant", "tui")
OURS = {*ROOMS, "bench"}  # here imports lead to names of ours

MEANT_TWICE = {
    "TextDelta": "a wire message of the Responses API, and one of the Messages API",
}

# Names with "page" in the engine. All mean the kernels' layout, except one of the system's.
PAGES_IN_ENGINE = {
    "PAGE_TOKENS",
    "kv_page",
    "KVPages",
    "on_pages",
    "PAGESIZE",
}

# Private names that tests may touch: other packages' of the same name, and strings that are no
# names.
OF_OTHERS = {
    ("tests/cluster/test_ray_hooks.py", "_replicas"): "an attribute of Ray's request router",
    ("tests/e2e/clients/test_protocols.py", "_client"): "ollama's client closes only by it",
    ("tests/kernels/cpu/test_library.py", "_name"): "the path of a ctypes library",
    ("tests/model/adapters/test_name_patterns.py", "_pattern"): "ends the names of settings",
    ("tests/model/test_expert_tensors.py", "_scale"): "ends the names of tensors",
    ("tests/quant/run/test_pipeline.py", "_scale"): "ends the names of tensors",
    ("tests/server/anthropic/test_messages.py", "_request_id"): "public in Anthropic's client",
    ("tests/server/dashboard/test_web_dashboard.py", "_make_app"): "a method of textual-serve's",
    ("tests/server/ollama/test_ollama.py", "_client"): "ollama's client closes only by it",
}


def modules(root: Path) -> Iterator[tuple[str, ast.Module]]:
    """Every module of the product under a root, by its path from there."""
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            inside = path.relative_to(root / room).parts
            # The package also reaches the other rooms through symlinks.
            if not any((root / room / part).is_symlink() for part in inside):
                yield str(path.relative_to(root)), ast.parse(path.read_text())


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a module and all statements in it, without looking into expressions."""
    yield node
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        inner = getattr(node, field, ())
        for statement in inner if isinstance(inner, list) else ():
            yield from statements(statement)


def bound(statement: ast.AST) -> Iterator[str]:
    """Names that a definition or an assignment binds; for `self` its attributes."""
    if isinstance(statement, DEFINED):
        yield statement.name
    for target in getattr(statement, "targets", [getattr(statement, "target", None)]):
        for node in ast.walk(target) if target else ():
            match node:
                case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="self"), attr=name):
                    yield name


class Found(NamedTuple):
    """The findings of one pass over all modules.

    Attributes:
        classes: modules that define each public class at their top level, by name of the class.
        questions: docstrings that open with a question word.
        private: names with one leading underscore, those of the benchmarks too.
    """

    classes: dict[str, set[str]]
    questions: list[str]
    private: set[str]


@cache
def looked_through(root: Path) -> Found:
    found = Found(defaultdict(set), [], set())
    for where, module in modules(root):
        for statement in module.body:
            if isinstance(statement, ast.ClassDef) and not statement.name.startswith("_"):
                found.classes[statement.name].add(where)
        for node in statements(module):
            found.private.update(filter(PRIVATE.fullmatch, bound(node)))
            if isinstance(node, DOCUMENTED) and OPENING.match(
                (ast.get_docstring(node, clean=False) or "").lstrip()
            ):
                found.questions.append(f"{where}: {getattr(node, 'name', 'the module')}")
    for path in (root / "scripts").rglob("*.py"):
        for node in statements(ast.parse(path.read_text())):
            found.private.update(filter(PRIVATE.fullmatch, bound(node)))
    return found


def exported_classes(root: Path) -> dict[str, set[str]]:
    return looked_through(root).classes


def indirect_questions(root: Path) -> list[str]:
    return looked_through(root).questions


def touched(node: ast.AST) -> Iterator[str]:
    """Names that an expression or import reaches; a string may be one for `monkeypatch`."""
    match node:
        case ast.Attribute(attr=name):
            yield name
        case ast.Constant(value=str(text)):
            yield text.rpartition(".")[2]
        case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] in OURS:
            yield from (name.name for name in names)


def private_uses(root: Path) -> dict[str, set[str]]:
    """Private names of the product that a test touches, by file, except its own classes' names."""
    found = {}
    for path in sorted((root / "tests").rglob("*.py")):
        text = path.read_text()
        suspects = {*SUSPECT.findall(text)} & looked_through(root).private
        if not suspects or path == Path(__file__):  # that file plants some
            continue  # most files need no parsing
        module = ast.parse(text)
        patches = "setattr(" in text or "patch(" in text
        touches = {
            name
            for node in ast.walk(module)
            if patches or not isinstance(node, ast.Constant)
            for name in touched(node)
        } & suspects
        for node in statements(module):
            if isinstance(node, ast.ClassDef):
                touches.difference_update(*map(bound, statements(node)))
        if touches:
            found[str(path.relative_to(root))] = touches
    return found


def names_of_pages(engine: Path) -> dict[str, str]:
    """Names with "page" in a folder's modules, each with one module that has it."""
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


def test_tests_touch_no_private_names() -> None:
    found = {(where, name) for where, names in private_uses(ROOT).items() for name in names}
    ours = sorted(found - OF_OTHERS.keys())
    assert not ours, f"hold behaviour, hand the thing in, or make the name public: {ours}"
    assert not OF_OTHERS.keys() - found, "OF_OTHERS has names that no test touches"


def test_a_private_name_in_a_test_is_found(tmp_path: Path) -> None:
    planted = {
        "quant/walk.py": "_BATCH = 3\n\nclass Walk:\n    def _run(self): self._place, x = 1, 2",
        "tests/test_attribute.py": "walk._place += 1",
        "tests/test_import.py": "from appliance.quant.walk import _BATCH",
        "tests/test_inherited.py": "class Other(Walk):\n    def run(self): return self._run()",
        "tests/test_patched.py": "monkeypatch.setattr('appliance.quant.walk._BATCH', 1)",
        "tests/test_table.py": "for name in ('_run',):\n    monkeypatch.setattr(Walk, name, 1)",
        "tests/test_own.py": "class Other:\n    _run = 1\n\n    def run(self): self._place = 1\n\n"
        "Other()._run, Other()._place, other._moves, 'ends with_run', row['_run']",
    }
    for name, text in planted.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert private_uses(tmp_path) == {
        "tests/test_attribute.py": {"_place"},
        "tests/test_import.py": {"_BATCH"},
        "tests/test_inherited.py": {"_run"},
        "tests/test_patched.py": {"_BATCH"},
        "tests/test_table.py": {"_run"},
    }
