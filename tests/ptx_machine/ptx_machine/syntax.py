"""The text of a PTX module to instructions whose operands are resolved."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_COMMENT = re.compile(r"//[^\n]*")
_LINE_DIRECTIVE = re.compile(r"^\s*\.(?:loc|file|pragma)\b[^\n]*", re.MULTILINE)
_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)[^{]*\{", re.DOTALL)
_PARAM = re.compile(r"\.param\s+\.(\w+)[^,]*?(\w+)\s*(?:,|$)")
_THREADS = re.compile(r"\.reqntid\s+(\d+)")
_REGISTERS = re.compile(r"(%?\w+)<(\d+)>")
_LABEL = re.compile(r"\s*([\w$]+):")
_GUARD = re.compile(r"@(!?)(%?\w+)\s+")
_FLOAT = re.compile(r"0([fFdD])([0-9a-fA-F]+)$")
_ADDRESS = re.compile(r"\[\s*(%?[\w$]+)\s*(?:\+\s*(-?\w+)|(-\w+))?\s*\]$")
WIDTHS = {"pred": 1, "b16": 16, "b32": 32, "b64": 64}  # of registers, in bits


@dataclass(frozen=True, slots=True)
class Register:
    """A register of each thread."""

    index: int


@dataclass(frozen=True, slots=True)
class Immediate:
    """A number in the instruction: the bits of a float, or an integer as it was written."""

    bits: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """A special register, a parameter, a variable in shared memory or a label."""

    name: str


@dataclass(frozen=True, slots=True)
class Address:
    """Of memory."""

    base: Register | Symbol
    offset: int


@dataclass(frozen=True, slots=True)
class Vector:
    """Several registers."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """A result and the predicate beside it."""

    value: Register
    predicate: Register


Operand = Register | Immediate | Symbol | Address | Vector | Pair


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: `@!p add.s32 a, b, c`."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: Register | None
    negated: bool
    head: str  # the opcode's first part

    @property
    def parts(self) -> list[str]:
        """The opcode, cut at its dots."""
        return self.opcode.split(".")


WAIT_FOR_PREVIOUS = "griddepcontrol.wait"


@dataclass(slots=True)
class Program:
    """A kernel."""

    name: str
    params: dict[str, str]  # name -> type, such as u64
    threads: int
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    widths: list[int] = field(default_factory=list)  # of the registers

    @property
    def waits(self) -> bool:
        """True if it may be launched before the kernel before it has ended."""
        return any(one.opcode == WAIT_FOR_PREVIOUS for one in self.instructions)


def parse(text: str) -> Program:
    """The one kernel of a module."""
    text = _LINE_DIRECTIVE.sub("", _COMMENT.sub("", text))
    entry = _ENTRY.search(text)
    assert entry, "there is no kernel"
    threads = _THREADS.search(text)
    assert threads, "the kernel does not say how many threads it takes"
    params = {name: kind for kind, name in _PARAM.findall(entry[2])}
    program = Program(entry[1], params, int(threads[1]))
    _Body(program).read(text, entry.end())
    return program


class _Body:
    """Reads statements; keeps the scopes in which registers are named."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._scopes: list[dict[str, Register]] = [{}]
        self._known: dict[str, Operand] = {}  # in the scopes that are open

    def read(self, text: str, at: int) -> None:
        while self._scopes:
            if text[at].isspace():
                at += 1
            elif text[at] == "{":
                self._scopes.append({})
                at += 1
            elif text[at] == "}":
                self._scopes.pop()
                self._known.clear()
                at += 1
            elif label := _LABEL.match(text, at):
                self._program.labels[label[1]] = len(self._program.instructions)
                at = label.end()
            else:
                end = text.index(";", at)
                self._statement(" ".join(text[at:end].split()))
                at = end + 1

    def _statement(self, text: str) -> None:
        if text.startswith(".reg"):
            _, kind, names = text.split(maxsplit=2)
            self._declare(kind.removeprefix("."), names)
        elif text:
            assert not text.startswith("."), f"an unknown directive: {text}"
            self._instruction(text)

    def _declare(self, kind: str, names: str) -> None:
        self._known.clear()
        width = WIDTHS.get(kind) or int(kind[1:])
        for entry in names.split(","):
            counted = _REGISTERS.match(entry.strip())
            every = [f"{counted[1]}{i}" for i in range(int(counted[2]))] if counted else [entry]
            for name in every:
                self._scopes[-1][name.strip()] = Register(len(self._program.widths))
                self._program.widths.append(width)

    def _instruction(self, text: str) -> None:
        guard = _GUARD.match(text)
        opcode, _, rest = text[guard.end() if guard else 0 :].partition(" ")
        operands = tuple(self._operand(part) for part in _split(rest))
        register = self._operand(guard[2]) if guard else None
        assert register is None or isinstance(register, Register)
        self._program.instructions.append(
            Instruction(
                opcode, operands, register, bool(guard and guard[1]), opcode.partition(".")[0]
            )
        )

    def _operand(self, text: str) -> Operand:
        found = self._known.get(text)
        if found is None:
            found = self._known[text] = self._read_operand(text)
        return found

    def _read_operand(self, text: str) -> Operand:
        if text.startswith("{"):
            return Vector(tuple(self._operand(part) for part in _split(text[1:-1])))
        if "|" in text:
            value, predicate = map(self._operand, text.split("|"))
            assert isinstance(value, Register)
            assert isinstance(predicate, Register)
            return Pair(value, predicate)
        if address := _ADDRESS.match(text):
            base = self._operand(address[1])
            assert isinstance(base, Register | Symbol)
            return Address(base, int(address[2] or address[3] or "0", 0))
        for scope in reversed(self._scopes):
            if text in scope:
                return scope[text]
        if number := _FLOAT.match(text):
            return Immediate(int(number[2], 16))
        if text[0].isdigit() or text[0] == "-":
            return Immediate(int(text.rstrip("U"), 0))
        return Symbol(text)


def _split(text: str) -> list[str]:
    """At the commas outside of braces and brackets."""
    if not {*"{["} & {*text}:
        return [part.strip() for part in text.split(",")] if text else []
    parts, depth, begin = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and not depth:
            parts.append(text[begin:i].strip())
            begin = i + 1
    last = text[begin:].strip()
    return [*parts, last] if last else parts
