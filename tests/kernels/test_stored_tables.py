"""What kernels are compiled to by every triton that there is a table of, not only by the installed.

`scripts/check_triton VERSION` compiles them anew and compares.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from compiled_kernels.gates import GATES, Gate, load, offenders

TABLES = sorted(Path(__file__).parent.glob("resources_triton_*.json"))


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("offending", GATES)
def test_no_kernel_in_a_table_is(table: Path, offending: Gate) -> None:
    assert not offenders(offending, load(table), table.stem.rpartition("_")[2])


def test_the_oldest_supported_compiler_has_a_table() -> None:
    assert {path.stem.rpartition("_")[2] for path in TABLES} >= {"3.6.0", "3.7.1"}
