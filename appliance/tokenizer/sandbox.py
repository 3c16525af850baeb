"""A Jinja environment for untrusted chat templates.

Sandboxed: no private attributes, no changes to inputs. Bounded: loops, calls and recursion share
one budget, and texts have a maximum length. Unbounded: single calls with a huge result (`center`)
or a long run time (`replace`), so a server renders in processes with limits, see `isolation`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

if TYPE_CHECKING:
    from jinja2.parser import Parser
    from jinja2.runtime import Context

MAX_STEPS = 200_000  # loop iterations and calls per rendering
MACRO_STEPS = 10  # per macro call, which takes this many times as long as a method call
MAX_EXPONENT = 64
MAX_NUMBER = 2**63
BUDGET = "the budget"  # key of a rendering's budget; no valid name in a template


@dataclass(slots=True)
class Budget:
    """The remaining budget of one rendering.

    Attributes:
        max_chars: longest text or list it may build.
    """

    max_chars: int
    steps: int = MAX_STEPS

    def spend(self, steps: int) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise SecurityError(f"it takes more than {MAX_STEPS} steps")

    def check_length(self, length: int) -> None:
        if length > self.max_chars:
            raise SecurityError(f"it builds a text of more than {self.max_chars} characters")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Implements the conventions of Hugging Face chat templates, with a budget per rendering."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # compute nothing when compiling a template
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
        )
        self.filters["tojson"] = _to_json
        self.filters["charge_rounds"] = _charge_rounds
        self.filters["charge_length"] = _charge_length
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        metered: nodes.Template = _Meter().visit(tree)
        return metered

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call an object for a template and charge the budget."""
        _budget(context).spend(MACRO_STEPS if isinstance(obj, Macro) else 1)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `+`, `*` or `**` for a template."""
        if operator == "**" and (not isinstance(right, int | float) or right > MAX_EXPONENT):
            raise SecurityError(f"it uses an exponent above {MAX_EXPONENT}")
        if any(isinstance(side, int) and abs(side) > MAX_NUMBER for side in (left, right)):
            raise SecurityError(f"it computes with a number above {MAX_NUMBER}")
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(count, int):
                    _budget(context).check_length(len(sequence) * count)
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, str | list | tuple):
            _budget(context).check_length(len(result))
        return result


def _budget(context: Context) -> Budget:
    budget = context.get(BUDGET)
    assert isinstance(budget, Budget)
    return budget


class _Meter(NodeTransformer):
    """Charges every loop and every concatenation of a template to the budget."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 - Jinja calls it by this name
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "charge_rounds")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, "charge_length")


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    assert isinstance(node, nodes.Expr)
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


@pass_context
def _charge_rounds(context: Context, iterable: Iterable[Any]) -> Iterable[Any]:
    budget = _budget(context)
    if isinstance(iterable, Sized):
        budget.spend(len(iterable))
        return iterable
    return _charged(iterable, budget)


def _charged(iterable: Iterable[Any], budget: Budget) -> Iterator[Any]:
    for item in iterable:
        budget.spend(1)
        yield item


@pass_context
def _charge_length(context: Context, text: str) -> str:
    _budget(context).check_length(len(text))
    return text


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class _GenerationTag(Extension):
    """`{% generation %}` marks the model's text for training; renders its content."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that Jinja looks for

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
