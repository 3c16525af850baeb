"""Machine code as nvdisasm lists it: instructions, the registers they write, and what follows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

_LINE = re.compile(
    r"^(?:([.$][\w.$]+):"
    r"|\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)[ \t]*(.*?)[ \t]*;)",
    re.MULTILINE,
)
_TARGET = re.compile(r"`\(([.$][\w.$]+)\)")
_REGISTER = re.compile(r"R(\d+)\b")
_PREDICATE = re.compile(r"!?U?P(?:\d|T)$")
_WARPGROUP_PRODUCT = re.compile(r"[HIQ]GMMA\b")
_SIZE = re.compile(r"\.\d+x(\d+)x\d+\b")
# These read the register that they name first.
_WITHOUT_RESULT = re.compile(
    r"(?:[IFHD]SETP2?|FCHK|BAR|WARPSYNC|NANOSLEEP|CALL|RET|BRX|JMX|WARPGROUP)\b"
)
_JUMP = re.compile(r"(?:BRA|JMP|CALL|WARPSYNC)\b")
_END = re.compile(r"(?:EXIT|RET|KILL)\b")
_FRAGMENT = 4  # registers of a lane for operand A, whatever its type


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction as it stands in a listing.

    Attributes:
        opcode: with its modifiers, such as LDG.E.128.
        operands: as they are written.
        guarded: a predicate decides whether it is issued.
    """

    opcode: str
    operands: tuple[str, ...]
    guarded: bool

    def __str__(self) -> str:
        return f"{self.opcode} {', '.join(self.operands)}".strip()

    @property
    def root(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def is_warpgroup_product(self) -> bool:
        return bool(_WARPGROUP_PRODUCT.match(self.opcode))

    @property
    def left_operand(self) -> range:
        """Registers that a warpgroup's product reads as operand A; none if it lies in memory."""
        found = _REGISTER.match(self.operands[1]) if self.is_warpgroup_product else None
        return range(int(found[1]), int(found[1]) + _FRAGMENT) if found else range(0)

    @property
    def written(self) -> range:
        """Registers that it writes; rather one too many than one too few."""
        if _WITHOUT_RESULT.match(self.opcode):
            return range(0)
        results = (each for each in self.operands if not _PREDICATE.match(each))
        found = _REGISTER.match(next(results, ""))
        return range(int(found[1]), int(found[1]) + self._width) if found else range(0)

    @property
    def _width(self) -> int:
        parts = self.opcode.split(".")
        if size := _SIZE.search(self.opcode):
            return int(size[1]) // (2 if "F32" in parts or self.root == "IGMMA" else 4)
        if "128" in parts or "MMA" in self.root or (self.root == "LDSM" and parts[-1] == "4"):
            return 4
        doubles = {"64", "WIDE", "F64", "S64", "U64"}
        is_double = doubles & set(parts) or self.root in {"CS2R", "DADD", "DMUL", "DFMA"}
        is_pair = self.root == "LDSM" and parts[-1] == "2"
        return 2 if (is_double and self.root != "SHF") or is_pair else 1


@dataclass(frozen=True)
class Listing:
    """A kernel's instructions in their order, and the places of its labels."""

    code: tuple[Instruction, ...]
    labels: dict[str, int]

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """For each instruction the places of those that may come next; it may fall through.

        Raises:
            ValueError: a jump whose target no label names.
        """
        joins: dict[str, list[int]] = {}
        for each in self.code:
            if each.root == "BSSY":
                joins.setdefault(each.operands[0], []).extend(self._targets(each))
        return tuple(
            tuple(self._next(i, each, joins.get((*each.operands, "")[0], [])))
            for i, each in enumerate(self.code)
        )

    def _next(self, place: int, each: Instruction, joined: list[int]) -> list[int]:
        after = [place + 1] if place + 1 < len(self.code) else []
        if each.root in ("BRX", "JMX"):
            raise ValueError(f"nobody knows where this goes: {each}")
        if each.root == "BSYNC":
            return [*after, *joined]
        if _END.match(each.opcode):
            return after if each.guarded else []
        if not _JUMP.match(each.opcode):
            return after
        # A predicate may stand among the operands, as in BRA.U !UP0, `(.L_x_2).
        always = each.root in ("BRA", "JMP") and not each.guarded and len(each.operands) == 1
        return [*([] if always else after), *self._targets(each)]

    def _targets(self, each: Instruction) -> list[int]:
        return [self.labels[name] for text in each.operands for name in _TARGET.findall(text)]


def read(sass: str) -> Listing:
    """Read what `nvdisasm --print-code` prints of a file with one kernel."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for label, guard, opcode, operands in _LINE.findall(sass):
        if label:
            labels[label] = len(code)
        else:
            split = tuple(part.strip() for part in operands.split(",")) if operands else ()
            code.append(Instruction(opcode, split, bool(guard)))
    return Listing(tuple(code), labels)
