"""Lets a model write calibration text: in its own distribution, free of others' licences.

The text is sampled in a separate process, so that the whole model's memory is free again before a
layer is quantized. That process ends with its parent, or when it exceeds its memory limit.
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
        rows: of tokens, all of one length.
        peak_ram: peak bytes of this process and the model's together.
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
    """Let a model write rows of tokens, each starting with a random word of its vocabulary.

    The same seed gives the same rows on one machine.

    Args:
        model_path: a .gguf file or a model folder; the whole model has to fit into memory.
        count: of rows.
        row_tokens: in each.
        seed: of first words and of sampling.
        device: cpu or cuda.
        max_ram: most bytes for this process and the model together; None is what is free.

    Raises:
        QuantizeError: the model cannot run here; the message says why.
    """
    own = psutil.Process().memory_info().rss
    left = 0 if max_ram is None else max(1, max_ram - own)
    numbers = [str(number) for number in (count, row_tokens, seed, left)]
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", PROGRAM, str(model_path.resolve()), device, *numbers],
        stdin=subprocess.PIPE,  # never written to: it closes when this process ends
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
