"""The goals reported as reached follow from the rows alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.gpu.goals import Verdict, verdicts
from bench.gpu.requests import idle_of
from bench.gpu.results import Results

H200 = "NVIDIA H200"


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results.read(tmp_path)


def timed(results: Results, suite: str, us: float, share: float = 0.0, **key: Any) -> None:
    row = {"us": {"median": us}, "share_of_copy": share}
    results.add({"suite": suite, "key": {"who": "ours", **key}, **row})


def verdict(results: Results, what: str, against: str, device: str = H200) -> Verdict:
    (found,) = (
        goal for goal in verdicts(results, device) if (goal.what, goal.against) == (what, against)
    )
    return found


def test_nothing_is_reached_without_a_row(results: Results) -> None:
    found = verdicts(results, H200)
    assert {(goal.value, goal.is_reached) for goal in found} == {(None, None)}
    assert all(goal.where for goal in found)


def test_the_worst_case_counts_and_others_do_not(results: Results) -> None:
    for m, share in ((1, 0.6), (16, 0.49), (256, 0.1)):
        place: dict[str, Any] = {"kernel": "w4a16", "shape": "gate_up", "m": m}
        timed(results, "matmul", 10, share, **place)
        timed(results, "matmul", 25 if m < 256 else 9.5, **place, who="cuBLAS bf16")
    failed = {"kernel": "w4a16", "shape": "gate_up", "m": 4, "who": "ours"}
    results.add({"suite": "matmul", "key": failed, "failed": "wrong"})
    bandwidth = verdict(results, "W4A16, M 1..16, gate_up", "copy bandwidth")
    assert (bandwidth.value, bandwidth.where, bandwidth.is_reached) == (0.49, "M 16", False)
    few = verdict(results, "W4A16, M 1..16", "cuBLAS BF16")
    assert (few.value, few.is_reached) == (2.5, True)
    many = verdict(results, "W4A16, M >= 256", "cuBLAS BF16")
    assert (many.value, many.is_reached) == (0.95, True)
    assert verdict(results, "W4A16, M 1..16", "torch int4pack").is_reached is None


def test_caches_are_compared_in_the_same_step(results: Results) -> None:
    step: dict[str, Any] = {"shape": "llama_8b", "batch": 16, "rows": 1, "context": 8192}
    short = {**step, "context": 64}
    timed(results, "decode", 100, 0.9, kernel="decode bf16", **step)
    timed(results, "decode", 100, 0.01, kernel="decode bf16", **short)  # limited by the launch
    timed(results, "decode", 40, kernel="decode int4", **step)
    timed(results, "decode", 100, kernel="decode int4", **short)
    timed(results, "decode", 120, kernel="verify bf16", **{**step, "rows": 4})
    timed(results, "decode", 90, kernel="decode bf16", who="FlexAttention, paged", **step)
    assert verdict(results, "decode attention, INT4 KV", "own BF16 kernel").value == 2.5
    assert verdict(results, "decode attention, BF16 KV", "copy bandwidth").value == 0.9
    verifying = verdict(results, "verifying 4 rows, GQA-4", "one row")
    assert (verifying.value, verifying.is_reached) == (1.2, False)
    flex = verdict(results, "decode attention, BF16 KV", "FlexAttention, paged")
    assert (flex.value, flex.is_reached) == (0.9, False)
    timed(results, "decode", 98, kernel="decode bf16", who="FlashInfer", **step)
    assert verdict(results, "decode attention, BF16 KV", "FlashInfer").value == 0.98


def test_the_engine_as_it_is_served_counts(results: Results) -> None:
    for kv, graphs, rate in (("int8", "auto", 420), ("int8", "off", 100), ("bf16", "auto", 999)):
        key: dict[str, Any] = {"engine": "ours", "weights": "int4", "kv": kv, "graphs": graphs}
        key |= {"what": "decode", "streams": 1}
        results.add({"suite": "engine", "key": key, "tokens_per_second": {"median": rate}})
    peer = {"engine": "transformers", "weights": "bf16", "what": "decode", "streams": 1}
    results.add({"suite": "peer_engine", "key": peer, "tokens_per_second": {"median": 30}})
    assert verdict(results, "8B INT4, 1 stream", "transformers generate").value == 14
    assert verdict(results, "8B INT4, one stream, tokens/s", "H200").is_reached
    elsewhere = verdict(results, "8B INT4, one stream", "H200", "NVIDIA H100 80GB HBM3")
    assert elsewhere.is_reached is None
    assert "420 tokens/s here" in elsewhere.where


def test_idle_is_what_no_span_covers() -> None:
    assert idle_of([(0.0, 4.0), (1.0, 2.0), (3.0, 5.0), (7.0, 8.0), (8.0, 10.0)]) == 0.2
