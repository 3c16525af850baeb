"""Finds machine code in an order that the hardware does not forgive, on any path through a kernel.

A machine that executes PTX cannot see either: the assembler chooses registers and moves
instructions.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from support.kernels.compiled_kernels.listing import Instruction, Listing

WAIT = "ACQBULK"  # griddepcontrol.wait
# Global memory, by whatever path; but not constants, shared memory, a thread's own, or prefetches.
_ACCESS = re.compile(r"U?(?:LD|ST|ATOM|RED|SU|TEX|TLD|TXD|BLKCP|BLKRED|TMA)")
_HARMLESS = re.compile(r"U?(?:LDC|LDCU|LDS|LDSM|LDL|STS|STSM|STL|ATOMS|LDGDEPBAR|REDUX|TMAPF)$")
# A program that ends, or lets the next kernel start, has waited for the one before.
_ENDS = ("EXIT", "PREEXIT")
_MOST_GROUPS = 8  # that the analysis tells apart

Flight = frozenset[tuple[int, int]]  # products: their place, and the groups closed since


def too_early(listing: Listing) -> list[str]:
    """Return the accesses to global memory, and ends, that a path reaches before the wait."""
    seen: set[int] = set()
    waiting = [0]
    while waiting:
        place = waiting.pop()
        if place not in seen:
            seen.add(place)
            each = listing.code[place]
            if each.opcode != WAIT or each.guarded:
                waiting.extend(listing.successors[place])
    return [str(listing.code[place]) for place in sorted(seen) if _is_late(listing.code[place])]


def _is_late(each: Instruction) -> bool:
    accesses = _ACCESS.match(each.root) and not _HARMLESS.match(each.root)
    return bool(accesses) or each.root in _ENDS


def overwritten_operands(listing: Listing) -> list[str]:
    """Return what writes to registers that a warpgroup's product in flight may still read.

    A product is in flight until a wait that leaves no more groups than were closed after its own.
    """
    code = listing.code
    before: dict[int, Flight] = {0: frozenset()}
    waiting = [0]
    while waiting:
        place = waiting.pop()
        after = _after(code[place], place, before[place])
        for successor in listing.successors[place]:
            known = before.get(successor)
            if known is None or not after <= known:
                before[successor] = after | (known or frozenset())
                waiting.append(successor)
    return [
        f"{code[product]} <- {code[place]}"
        for place, flight in sorted(before.items())
        for product in sorted({product for product, _ in flight})
        if _overlap(code[place].written, code[product].left_operand)
    ]


def _after(each: Instruction, place: int, flight: Flight) -> Flight:
    if each.opcode.startswith("WARPGROUP.DEPBAR") and not each.guarded:
        left = int(each.operands[1], 16)
        return frozenset((product, groups) for product, groups in flight if groups <= left)
    if each.is_warpgroup_product:
        flight |= {(place, 0)}
        if any(operand.startswith("gsb") for operand in each.operands):  # closes a group
            flight = frozenset((p, min(groups + 1, _MOST_GROUPS)) for p, groups in flight)
    return flight


def _overlap(one: range, other: range) -> bool:
    return bool(one and other) and one.start < other.stop and other.start < one.stop


def products_of_registers(code: Iterable[Instruction]) -> int:
    """Count the warpgroup's products whose operand A lies in registers."""
    return sum(bool(each.left_operand) for each in code)
