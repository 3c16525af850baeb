"""Checks model files: contents against published hashes, headers against sizes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from appliance.doctor.finding import Finding, Grade, Scope
from appliance.doctor.model_contents import failed
from appliance.errors import ApplianceError
from appliance.hub.hashes import find_damaged, known_hashes
from appliance.progress.progress import ProgressLine


def check_model(scope: Scope) -> Iterator[Finding]:
    """Check the files of the model that the settings or a flag name."""
    if scope.model_problem is not None:
        fix = "correct the name in --model, APPLIANCE_MODEL or the configuration file"
        yield Finding("model", Grade.FAIL, scope.model_problem, fix)
        return
    name = scope.engine.model or "the default model"
    if scope.model is None:
        found, fix = f"{name} is not on this machine", "`appliance serve` fetches it"
        yield Finding("model", Grade.UNKNOWN, found, fix)
        return
    path = scope.model.path
    if scope.is_quick:
        yield Finding("model", Grade.UNKNOWN, f"{path} is there; --quick leaves out the rest")
        return
    yield _contents(path)
    yield _hashes(path)
    yield _card(path)


def _contents(path: Path) -> Finding:
    """Open the model as an engine does, which finds missing tensors."""
    start = time.monotonic()
    try:
        from appliance.model.encoder.source import open_checked  # imports NumPy

        source = open_checked(path)
    except ApplianceError as error:
        return failed("model", error, path)
    tensors, seconds = len(source.slots()), time.monotonic() - start
    found = f"{path}: {source.spec.architecture}, {tensors} tensors in place; {seconds:.1f} s"
    return Finding("model", Grade.OK, found)


def _hashes(path: Path) -> Finding:
    expected = known_hashes(path)
    if not expected:
        found = "no hashes are known for these files; their headers and sizes were checked"
        return Finding("model hashes", Grade.UNKNOWN, found)
    start = time.monotonic()
    with ProgressLine() as progress:
        damaged = find_damaged(expected, progress)
    if damaged:
        found = f"{damaged[0]} is damaged: its hash is not {expected[damaged[0]][:12]}..."
        return Finding("model hashes", Grade.FAIL, found, f"remove {path} and fetch it again")
    seconds = time.monotonic() - start
    found = f"{len(expected)} of {len(expected)} right; {seconds:.1f} s"
    return Finding("model hashes", Grade.OK, found)


def _card(path: Path) -> Finding:
    from appliance.quant.quality.card import card_of

    try:
        card = card_of(path)
    except ApplianceError as error:
        words, _, fix = str(error).rpartition("; ")
        return Finding("quality card", Grade.FAIL, words, fix)
    if card is None:
        return Finding("quality card", Grade.OK, "none; `appliance evaluate` makes one")
    return Finding("quality card", Grade.OK, f"of these weights: {card.model.weights}")
