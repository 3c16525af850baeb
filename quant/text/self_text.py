"""Lets a model write calibration text: its own distribution, free of licences.

A separate process samples the text, so that all of its memory is free before a layer is quantized.
It exits if its parent does, or if it exceeds its memory limit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from appliance.errors import QuantizeError
from appliance.runtime import child_environment

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = "appliance.quant.text.row_writer"


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """Rows that a model wrote.

    Attributes:
        peak_ram: peak bytes of both processes together.
    """

    rows: list[list[int]]
    peak_ram: int


def sample_rows(
    model_path: Path,
    count: int,
    row_tokens: int,
    seed: int,
    *,
    device: str = "cpu",
    max_ram: int | None = None,
) -> WrittenRows:
    """Let a model write rows of tokens, each from a random first word.

    The same seed gives the same rows on one machine.

    Args:
        model_path: a .gguf file or a model folder; the whole model must fit into memory.
        seed: of first words and sampling.
        max_ram: limit in bytes for both processes; None takes what is free.

    Raises:
        QuantizeError: the model cannot run here; the message says why.
    """
    own = psutil.Process().memory_info().rss
    left = 0 if max_ram is None else max(1, max_ram - own)
    numbers = [str(number) for number in (count, row_tokens, seed, left)]
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", PROGRAM, str(model_path.resolve()), device, *numbers],
        stdin=subprocess.PIPE,  # closes when this process ends
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=child_environment(),
        text=True,
    )
    with child:
        try:
            assert child.stdout is not None
            assert child.stderr is not None
            output, errors = child.stdout.read(), child.stderr.read()
        except BaseException:
            child.kill()
            raise
    if child.returncode:
        reason = (errors.strip().splitlines() or ["it was killed"])[-1]
        raise QuantizeError(
            f"the model cannot write its own calibration text: {reason}; give a text with"
            " --calibration"
        )
    written = json.loads(output.splitlines()[-1])
    return WrittenRows(written["rows"], own + written["peak_ram"])
