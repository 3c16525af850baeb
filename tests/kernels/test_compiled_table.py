"""Tables of compiled kernels: which rows are stale, sampled, or far dearer."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.kernels.compiled_kernels.digest import digest
from support.kernels.compiled_kernels.table import dearer, every_signature, load, save, stale
from support.runs.turns import sample, seed_of_tree

TRITON = "3.6.0"
KEYS = list(every_signature())
ROW = {"registers": 100, "shared": 0, "instructions": 1000, "wide_loads": 8, "loop": {"HMMA": 100}}


def test_rows_that_are_missing_or_of_other_sources_are_stale() -> None:
    table = {
        key: {"digest": digest(signature, key[1], TRITON)}
        for key, signature in every_signature().items()
    }
    assert stale(table, TRITON) == []
    assert stale(table, "3.7.1") == KEYS
    table[KEYS[1]] = {"digest": table[KEYS[0]]["digest"]}
    del table[KEYS[3]]
    assert stale(table, TRITON) == [KEYS[1], KEYS[3]]


def test_a_table_is_read_as_it_was_written_one_line_a_row(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    table = {("kernel", 80): ROW, ("kernel", 120): {**ROW, "registers": 1}, ("other", 80): ROW}
    save(path, table, TRITON)
    assert load(path) == table
    assert sum("registers" in line for line in path.read_text().splitlines()) == len(table)
    assert load(tmp_path / "missing.json") == {}


def test_samples_of_different_seeds_reach_every_row() -> None:
    seen = set()
    for seed in range(200):
        chosen = sample(KEYS, 12, str(seed))
        assert 0 < len(chosen) < len(KEYS) / 6
        assert chosen == sample(KEYS, 12, str(seed))
        seen.update(chosen)
    assert seen == set(KEYS)
    assert sample(KEYS, 1, "") == KEYS
    assert len(sample(KEYS[:2], 1000, "")) == 1


@pytest.mark.parametrize(
    ("change", "ways"),
    [
        ({}, []),
        ({"registers": 110, "instructions": 900, "loop": {"HMMA": 104}}, []),
        ({"registers": 111}, ["registers 100 -> 111"]),
        ({"registers": 89}, ["registers 100 -> 89"]),
        ({"shared": 1}, ["shared 0 -> 1"]),
        ({"wide_loads": 0}, ["wide_loads 8 -> 0"]),
        ({"loop": {"HMMA": 50}}, []),
        ({"loop": {"HMMA": 106}}, ["instructions of the hot loop 100 -> 106"]),
    ],
)
def test_a_row_is_dearer_past_a_tenth_or_in_its_loop_a_twentieth(
    change: dict[str, object], ways: list[str]
) -> None:
    assert list(dearer({**ROW, **change}, ROW)) == ways


def test_a_tree_has_one_seed() -> None:
    seed = seed_of_tree()
    assert seed == seed_of_tree()
    assert set(seed) <= set("0123456789abcdef")
