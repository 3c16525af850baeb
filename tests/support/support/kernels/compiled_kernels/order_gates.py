"""Gates on the order of machine code, by each assembler: each finds the kernels that violate it.

They judge a table of orders (table.py), whichever triton made it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from support.kernels.compiled_kernels.gates import REGISTER_LIMIT, shipped
from support.kernels.compiled_kernels.table import DIGESTS, Row, Table

Case = tuple[str, int, str]  # a row's key, and the assembler
OrderGate = Callable[[Table], Collection[Case]]  # finds the violations

MOST_OF_OTHER = 160  # bytes of the stack; it needs more registers for tiles of many rows


def codes(table: Table) -> Iterator[tuple[Case, Row]]:
    """Yield what each assembler made of each row."""
    for (name, capability), row in table.items():
        for assembler, code in row.items():
            if assembler not in DIGESTS:
                yield (name, capability, assembler), code


def spilling(table: Table) -> list[Case]:
    """Kernels whose registers do not suffice, by the assembler that triton takes."""
    return [case for case, code in codes(table) if code["stack"] and _is_taken(case)]


def spilling_much(table: Table) -> list[Case]:
    """Kernels that spill more than some registers, by the other assembler."""
    return [
        case for case, code in codes(table) if code["stack"] > MOST_OF_OTHER and not _is_taken(case)
    ]


def _is_taken(case: Case) -> bool:
    _, capability, assembler = case
    return assembler == ("ptxas" if capability < 100 else "ptxas-blackwell")


def too_large(table: Table) -> list[Case]:
    return [case for case, code in codes(table) if code["registers"] > REGISTER_LIMIT]


def overwriting_operands(table: Table) -> list[Case]:
    """Kernels that write to registers which a product in flight may still read."""
    return [case for case, code in codes(table) if code["overwritten"]]


def starting_too_early(table: Table) -> list[Case]:
    """Kernels that touch memory, end or let others start before the one before has ended."""
    return [case for case, code in codes(table) if code["early"]]


def never_waiting(table: Table) -> list[Case]:
    """Kernels that start early and do not wait once."""
    return [case for case, code in codes(table) if " early" in case[0] and not code["waits"]]


# Known faults that nobody has fixed: kernels that start early need one or two registers more than
# others, and spill those.
_SPILLED = (
    "down int3 g16 q3_k bf16 early rows 16",
    "down int4 g32 q4_k bf16 early rows 256",
    "down int4 g32 q4_k bf16 early rows 512",
    "down int4 g64 fp32_offset bf16 bias early rows 128",
    "down int5 g32 q4_k bf16 early rows 16",
    "gate_up fp4 g16 halves bf16 early rows 128",
    "gate_up int4 g128 fp32 bf16 early rows 16",
    "gate_up int4 g32 fp16_offset bf16 gated by gelu_tanh early rows 256",
    "gate_up int4 per channel none bf16 early rows 128",
)
KNOWN: dict[tuple[str, OrderGate], tuple[Case, ...]] = {
    ("3.7.1", spilling): tuple((f"packed_matmul llama_8b {name}", 90, "ptxas") for name in _SPILLED)
}


def offenders(gate: OrderGate, table: Table, triton: str) -> list[Case]:
    """The violations of a gate, without those that it is known to find with that triton."""
    return [case for case in gate(shipped(table)) if case not in KNOWN.get((triton, gate), ())]


ORDER_GATES: tuple[OrderGate, ...] = (
    spilling,
    spilling_much,
    too_large,
    overwriting_operands,
    starting_too_early,
    never_waiting,
)
