"""Judge the goals of a GPU by the rows of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.gpu.results import Results

FEW = 16  # the most rows of x in decoding
MANY = 256
SERVED = ("int4", "int8", "auto")  # weights, cache and graphs as they are served by default
BANDWIDTH_BOUND = 16 * 8192  # tokens of a step from which launches cost nothing
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One goal.

    Attributes:
        what: the measured quantity.
        against: the quantity that it is a share or a multiple of.
        goal: in words.
        value: the worst case that was measured; None if there is none.
        where: that case, or why there is none.
        is_reached: None if nothing was measured.
    """

    what: str
    against: str
    goal: str
    value: float | None
    where: str
    is_reached: bool | None


Cases = list[tuple[str, float]]


def verdicts(results: Results, device: str) -> list[Verdict]:
    """Judge every goal, in the order in which they are written down."""
    times = Times(results)
    found = [
        _least("W4A16, M 1..16, gate_up", "copy bandwidth", 0.5, times.shares("gate_up")),
        _least("W4A16, M 1..16, 8192x28672", "copy bandwidth", 0.65, times.shares("large")),
        _least("W4A16, M 1..16", "cuBLAS BF16", 2.2, times.multiples("cuBLAS bf16", few=True)),
        _least("W4A16, M 1..16", "torch int4pack", 1.3, times.multiples("torch int4", few=True)),
        _least("W4A16, M >= 256", "cuBLAS BF16", 0.9, times.multiples("cuBLAS bf16", few=False)),
        _least("decode attention, BF16 KV", "copy bandwidth", 0.85, times.decode_shares()),
        times.decode_peer(),
    ]
    for form, goal in (("fp8", 1.7), ("int8", 1.6), ("int4", 2.2)):
        cases = times.kv_ratios(form)
        found.append(_least(f"decode attention, {form.upper()} KV", "own BF16 kernel", goal, cases))
    found.append(_most("verifying 4 rows, GQA-4", "one row", 1.15, times.verifying()))
    ours, theirs = _streams(results, "ours"), _streams(results, "transformers")
    for streams, goal in ((1, 8.0), (64, 24.0)):
        cases = [
            (f"{ours[streams]:.0f} over {theirs[streams]:.0f} tokens/s", ours[streams] / rate)
            for rate in [theirs.get(streams)]
            if rate and streams in ours
        ]
        what = f"8B INT4, {streams} stream{'s' * (streams > 1)}"
        found.append(_least(what, "transformers generate", goal, cases))
    alone: Cases = [("tokens/s", ours[1])] if 1 in ours else []
    if "H200" in device:
        found.append(_least("8B INT4, one stream, tokens/s", "H200", 400, alone))
    else:
        value = f"{ours[1]:.0f} tokens/s here; " if 1 in ours else ""
        where = f"{value}the goal is an H200's, and this is {device}"
        found.append(Verdict("8B INT4, one stream", "H200", ">= 400 tokens/s", None, where, None))
    found.append(_most("GPU idle in a decode loop", "-", 0.05, _idle(results)))
    found.append(_memory(results))
    for which, goal in (("first", 20.0), ("second", 8.0)):
        cases = [
            (f"first token after {row['first_token_seconds']} s", row["ready_seconds"])
            for row in _found(results, "start")
            if row["key"]["what"] == f"{which} start"
        ]
        found.append(_most(f"{which} start, seconds", "8B shape, weights made there", goal, cases))
    agreement = [
        (f"{row['key']['model']}, {row['positions']} positions", row["agreement"])
        for row in _found(results, "real_model")
        if row["key"]["kv"] == "bf16"
    ]
    found.append(_least("real weights, likeliest tokens", "the CPU in float32", 0.98, agreement))
    return found


class Times:
    """Median microseconds and shares of the copy bandwidth, by key."""

    def __init__(self, results: Results) -> None:
        self._rows = [row for row in results.of("matmul", "decode", "prefill") if "us" in row]

    def shares(self, shape: str) -> Cases:
        """Return shares of the copy bandwidth of W4A16 with up to `FEW` rows."""
        return [
            (f"M {row['key']['m']}", row["share_of_copy"])
            for row in self._w4("ours")
            if row["key"]["shape"] == shape and row["key"]["m"] <= FEW
        ]

    def multiples(self, peer: str, *, few: bool) -> Cases:
        """Return W4A16's speed over a peer's, on the shapes of the goals."""
        theirs = {_place(row): _us(row) for row in self._w4(peer)}
        return [
            (f"{row['key']['shape']} M {row['key']['m']}", theirs[_place(row)] / _us(row))
            for row in self._w4("ours")
            if _place(row) in theirs
            and (
                row["key"]["m"] <= FEW and row["key"]["shape"] in ("gate_up", "large")
                if few
                else row["key"]["m"] >= MANY
            )
        ]

    def decode_shares(self) -> Cases:
        """Return BF16 decode's shares of the copy bandwidth, in steps bound by memory."""
        return [
            (_step(row), row["share_of_copy"])
            for row in self._decode("decode bf16")
            if row["key"]["batch"] * row["key"]["context"] >= BANDWIDTH_BOUND
        ]

    def decode_peer(self) -> Verdict:
        """Return BF16 decode's speed over FlashInfer's, or else FlexAttention's."""
        ours = {_place(row): _us(row) for row in self._decode("decode bf16")}
        for name in ("FlashInfer", "FlexAttention, paged"):
            cases = [
                (_step(row), _us(row) / ours[_place(row)])
                for row in self._decode("decode bf16", name)
                if _place(row) in ours
            ]
            if cases:
                break
        return _least("decode attention, BF16 KV", name, 0.95, cases)

    def kv_ratios(self, form: str) -> Cases:
        """Return speed over a quantized cache as a multiple of BF16's in the same step."""
        bf16 = {_place(row): _us(row) for row in self._decode("decode bf16")}
        return [
            (_step(row), bf16[_place(row)] / _us(row))
            for row in self._decode(f"decode {form}")
            if _place(row) in bf16
            and row["key"]["batch"] * row["key"]["context"] >= BANDWIDTH_BOUND
        ]

    def verifying(self) -> Cases:
        """Return the time of four rows a sequence over that of one, same cache."""
        cases = []
        for form in ("bf16", "int8"):
            one = {(_step(row)): _us(row) for row in self._decode(f"decode {form}")}
            cases += [
                (f"{form} {_step(row)}", _us(row) / one[_step(row)])
                for row in self._decode(f"verify {form}")
                if _step(row) in one
            ]
        return cases

    def _w4(self, who: str) -> Iterable[Row]:
        return self._of("w4a16", who)

    def _decode(self, kernel: str, who: str = "ours") -> Iterable[Row]:
        return self._of(kernel, who)

    def _of(self, kernel: str, who: str) -> Iterable[Row]:
        return [
            row for row in self._rows if row["key"]["kernel"] == kernel and row["key"]["who"] == who
        ]


def _streams(results: Results, engine: str) -> dict[int, float]:
    """Return tokens per second by streams; ours as it is served by default."""
    rates = {}
    for row in _found(results, "engine", "peer_engine"):
        key = row["key"]
        if key["engine"] != engine or key["what"] != "decode":
            continue
        if engine != "ours" or (key["weights"], key["kv"], key["graphs"]) == SERVED:
            rates[key["streams"]] = row["tokens_per_second"]["median"]
    return rates


def _idle(results: Results) -> Cases:
    return [
        (f"{row['key']['kv']}, {row['key']['streams']} streams", row["idle_share"])
        for row in _found(results, "engine")
        if row["key"]["what"] == "idle share" and row["idle_share"] is not None
    ]


def _memory(results: Results) -> Verdict:
    cases = [
        (row["key"]["kv"], abs(row["used_of_planned"] - 1))
        for row in _found(results, "engine")
        if "used_of_planned" in row
    ]
    return _most("memory used, off the plan by", "the plan", 0.03, cases)


def _found(results: Results, *suites: str) -> Iterable[Row]:
    return [row for row in results.of(*suites) if "failed" not in row]


def _least(what: str, against: str, goal: float, cases: Cases) -> Verdict:
    return _worst(what, against, f">= {goal:g}", cases, min, lambda value: value >= goal)


def _most(what: str, against: str, goal: float, cases: Cases) -> Verdict:
    return _worst(what, against, f"<= {goal:g}", cases, max, lambda value: value <= goal)


def _worst(
    what: str,
    against: str,
    goal: str,
    cases: Cases,
    choose: Callable[..., tuple[str, float]],
    reaches: Callable[[float], bool],
) -> Verdict:
    if not cases:
        return Verdict(what, against, goal, None, "no such row, or it failed: see below", None)
    where, value = choose(cases, key=lambda case: case[1])
    return Verdict(what, against, goal, round(value, 3), where, reaches(value))


def _us(row: Row) -> float:
    return float(row["us"]["median"])


def _place(row: Row) -> tuple[Any, ...]:
    """Return a row's key without the contender and without the cache's format."""
    key = row["key"]
    return tuple(value for name, value in key.items() if name not in ("who", "kernel"))


def _step(row: Row) -> str:
    return f"{row['key']['batch']} x {row['key']['context']}"
