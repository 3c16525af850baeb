"""Lets a model write rows of text or answer prompts, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import psutil

from appliance.errors import QuantizeError
from appliance.quant.text.answerer import AnswerJob, PictureJob, ScoredTexts, WrittenRows
from appliance.runtime import child_environment

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM = "appliance.quant.text.answerer"
Result = TypeVar("Result", WrittenRows, ScoredTexts)
Openings = list[list[int]]  # prompts that follow each other in a row


def sample_rows(
    model_path: Path,
    openings: Sequence[Openings],
    row_tokens: int,
    seed: int,
    *,
    device: str = "cpu",
    max_ram: int | None = None,
) -> WrittenRows:
    """Let a model write rows of tokens after openings.

    The same seed gives the same rows on one machine.

    Args:
        model_path: a .gguf file or a model folder; the whole model must fit into memory.
        openings: of each row; the next one follows where the model ends an answer. After a single
            one the model never ends.
        max_ram: limit in bytes for both processes; None takes what is free.

    Raises:
        QuantizeError: the model cannot run here; the message says why.
    """
    try:
        return _done(model_path, openings, row_tokens, seed, device, max_ram)
    except QuantizeError as error:
        raise QuantizeError(
            f"the model cannot write its own calibration text: {error}; give a text with"
            " --calibration"
        ) from error


def answer(
    model_path: Path,
    prompts: Sequence[list[int]],
    most_tokens: int,
    *,
    device: str = "cpu",
    max_ram: int | None = None,
) -> list[list[int]]:
    """Let a model answer prompts greedily; return the tokens of its answers.

    Args:
        most_tokens: of an answer.

    Raises:
        QuantizeError: the model cannot run here; the message says why.
    """
    length = max(map(len, prompts)) + most_tokens
    openings = [[prompt] for prompt in prompts]
    return _done(model_path, openings, length, None, device, max_ram).rows


def score_pictures(
    model_path: Path,
    pictures: Sequence[tuple[Path, str]],
    *,
    device: str = "cpu",
    max_ram: int | None = None,
) -> ScoredTexts:
    """Let a model tell how likely it finds a text behind each picture.

    Args:
        pictures: with their texts; the model writes those that are empty.

    Raises:
        QuantizeError: the model cannot run here, or reads no pictures; the message says why.
    """
    job = PictureJob(
        model=str(model_path.resolve()),
        device=device,
        pictures=[str(path.resolve()) for path, _ in pictures],
        texts=[text for _, text in pictures],
        most=_left_of(max_ram),
    )
    return _run(job, ScoredTexts)


def _done(
    model_path: Path,
    openings: Sequence[Openings],
    length: int,
    seed: int | None,
    device: str,
    max_ram: int | None,
) -> WrittenRows:
    """Do a job in another process; the peak is that of both together."""
    own = psutil.Process().memory_info().rss
    job = AnswerJob(
        model=str(model_path.resolve()),
        device=device,
        openings=list(openings),
        length=length,
        seed=seed,
        most=_left_of(max_ram),
    )
    written = _run(job, WrittenRows)
    return WrittenRows(written.rows, own + written.peak_ram)


def _left_of(max_ram: int | None) -> int:
    """Return the bytes that another process may take beside this one; 0 for no limit."""
    return 0 if max_ram is None else max(1, max_ram - psutil.Process().memory_info().rss)


def _run(job: AnswerJob | PictureJob, result: type[Result]) -> Result:
    with tempfile.TemporaryDirectory(prefix="appliance-") as folder:
        path = Path(folder) / "job.json"
        path.write_bytes(msgspec.json.encode(job))
        return msgspec.json.decode(_output_of(path), type=result)


def _output_of(job: Path) -> str:
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", PROGRAM, str(job)],
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
        raise QuantizeError((errors.strip().splitlines() or ["it was killed"])[-1])
    return output.splitlines()[-1]
