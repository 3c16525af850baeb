"""Sampling settings of running sequences by slot, so that a step gathers its rows at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as Sequences
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from appliance.engine.grammars.matchers import Masks
    from appliance.engine.nouns.sequence import Sequence

_MASK64 = 2**64 - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = [np.uint64(shift) for shift in (30, 27, 31, 11)]

ROW = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("places", np.int32),  # row in the table of seen tokens; -1 without penalties
        ("repetition", np.float32),
        ("presence", np.float64),
        ("frequency", np.float64),
        ("key", np.uint64),  # of its random numbers
        ("adjusts", np.bool_),  # changes single logits: bias, bans, the end of a thought
        ("reports", np.bool_),  # reports log probabilities
        ("searches", np.bool_),  # is a beam
        ("obeys", np.bool_),  # has a grammar
        ("is_plain", np.bool_),  # none of the above, and no penalties
    ]
)

# The fields for a step's kernels, by the names of the staging arrays.
STAGED = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "places",
    "repetition",
    "presence",
    "frequency",
)


class StepSettings(NamedTuple):
    """Sampling settings of a step's rows, (num_rows,) `ROW`, and the rows that need more."""

    rows: NDArray[Any]
    adjusted: Sequences[int] = ()
    reported: Sequences[int] = ()
    searching: Sequences[int] = ()
    obeying: Sequences[int] = ()
    has_penalties: bool = False
    masks: Future[Masks] | None = None  # of rows with a grammar


class SlotSettings:
    """One `ROW` per slot, written when a sequence takes the slot; slot 0 is greedy."""

    def __init__(self, num_slots: int) -> None:
        self._rows = np.zeros(num_slots + 1, dtype=ROW)
        self._rows[0]["top_p"] = 1.0
        self._rows[0]["places"] = -1
        self._rows[0]["repetition"] = 1.0
        self._rows[0]["is_plain"] = True
        self._owners: list[Sequence | None] = [None] * (num_slots + 1)
        self._last: tuple[list[int], StepSettings] | None = None  # slots of the last call

    def of(self, sequences: Iterable[Sequence], padding: int = 0) -> StepSettings:
        """Return the settings of running sequences, followed by greedy padding."""
        owners, slots = self._owners, []
        for sequence in sequences:
            slot = sequence.slot
            if owners[slot] is not sequence:
                self._move_in(sequence)
            slots.append(slot)
        slots += [0] * padding
        if self._last is None or self._last[0] != slots:
            self._last = slots, self._pick(slots)
        return self._last[1]

    def _pick(self, slots: list[int]) -> StepSettings:
        rows = self._rows[slots]
        if rows["is_plain"].all():
            return StepSettings(rows)
        return StepSettings(
            rows,
            adjusted=np.flatnonzero(rows["adjusts"]).tolist(),
            reported=np.flatnonzero(rows["reports"]).tolist(),
            searching=np.flatnonzero(rows["searches"]).tolist(),
            obeying=np.flatnonzero(rows["obeys"]).tolist(),
            has_penalties=bool((rows["places"] >= 0).any()),
        )

    def _move_in(self, sequence: Sequence) -> None:
        slot, sampling = sequence.slot, sequence.request.sampling
        assert slot, "a sequence that does not run"
        self._owners[slot] = sequence
        self._last = None
        adjusts = sampling.adjusts_logits
        reports, searches = sampling.logprobs is not None, sampling.use_beam_search
        obeys = sampling.grammar is not None
        self._rows[slot] = (
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            slot - 1 if sampling.has_penalties else -1,
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
            random_key(sequence),
            adjusts,
            reports,
            searches,
            obeys,
            not (adjusts or reports or searches or obeys or sampling.has_penalties),
        )


def random_key(sequence: Sequence) -> int:
    """Return the 64-bit key of a sequence's random numbers."""
    seed = sequence.request.sampling.seed or 0
    return (seed ^ (sequence.index * 0xD1342543DE82EF95)) & _MASK64


def uniform_numbers(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a number in [0, 1) per row that depends only on its key and position.

    Two rounds of the SplitMix64 finalizer (Steele, Lea and Flood 2014).

    Args:
        keys: (num_rows,), `ROW["key"]`: the request's seed and the choice.
        positions: (num_rows,) of the drawn tokens.
    """
    x = keys ^ (positions.astype(np.uint64) * _GOLDEN)
    for _ in range(2):
        x += _GOLDEN
        x ^= x >> _SHIFTS[0]
        x *= _FIRST
        x ^= x >> _SHIFTS[1]
        x *= _SECOND
        x ^= x >> _SHIFTS[2]
    numbers: NDArray[np.float64] = (x >> _SHIFTS[3]).astype(np.float64) / 2**53
    return numbers
