"""A program that runs a model on prompts and prints what it writes; see `answers`.

It exits if its parent does, or if it exceeds its memory limit.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from appliance.errors import ApplianceError, MemoryPlanError, QuantizeError

if TYPE_CHECKING:
    from appliance.llm import LLM
    from appliance.model.source import ModelSource

AT_ONCE = 32  # prompts answered together; another number changes rounding
WATCHED_EVERY = 0.02  # seconds
BLOCK_TOKENS = 32  # cache slots allocated at once, on any device
ENDS = 8  # openings of a row whose answers may end early
LEAST_ANSWER = 16  # tokens
PICTURE_CONTEXT = 8192  # tokens of a picture and its text, at most
MOST_WRITTEN = 48  # tokens about a picture
QUESTION = "Describe this picture."
MIB = 1 << 20


class AnswerJob(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """Work for a model.

    Attributes:
        openings: of each row or answer, one list of prompts after another.
        length: tokens of a row, or of prompt and answer together at most.
        seed: samples rows of exactly `length` tokens, in which answers follow each other; None
            answers the first opening of each greedily, until the model ends.
        most: bytes of memory of both processes; 0 for no limit.
    """

    model: str
    device: str
    openings: list[list[list[int]]]
    length: int
    seed: int | None = None
    most: int = 0


class PictureJob(msgspec.Struct, frozen=True, kw_only=True, tag="pictures"):
    """Texts behind pictures to score.

    Attributes:
        pictures: paths.
        texts: about each; the model writes those that are empty.
        most: bytes of memory of both processes; 0 for no limit.
    """

    model: str
    device: str
    pictures: list[str]
    texts: list[str]
    most: int = 0


class ScoredTexts(msgspec.Struct, frozen=True):
    """Texts, and what the model says of each token of theirs.

    Attributes:
        logprobs: natural logarithms of their probabilities.
        tops: the likeliest tokens in their places.
    """

    texts: list[str]
    logprobs: list[list[float]]
    tops: list[list[int]]


class WrittenRows(msgspec.Struct, frozen=True):
    """Rows, prompts included, or answers without; and the peak bytes of this process."""

    rows: list[list[int]]
    peak_ram: int


def work_here(job: AnswerJob) -> list[list[int]]:
    """Do a job in this process."""
    from appliance.llm import LLM
    from appliance.model.source import open_model

    llm = LLM(
        job.model,
        max_model_len=job.length,
        max_num_seqs=AT_ONCE,
        device=job.device,
        kv_cache_dtype="bf16",
        kv_cache_memory=_cache_bytes(open_model(Path(job.model)), job.length, len(job.openings)),
    )
    return _answers(llm, job) if job.seed is None else _rows(llm, job, job.seed)


def score_here(job: PictureJob) -> ScoredTexts:
    """Do a job in this process.

    Raises:
        QuantizeError: the model reads no pictures.
    """
    from appliance.engine.nouns.sampling_params import SamplingParams
    from appliance.llm import LLM
    from appliance.model.source import open_model

    source = open_model(Path(job.model))
    length = min(source.spec.context_length, PICTURE_CONTEXT)
    llm = LLM(
        job.model,
        max_model_len=length,
        max_num_seqs=1,
        device=job.device,
        kv_cache_dtype="bf16",
        kv_cache_memory=_cache_bytes(source, length, 1),
    )
    if not llm.engine.info.reads_pictures:
        raise QuantizeError(f"{Path(job.model).name} reads no pictures here")
    scored = SamplingParams(max_tokens=0, temperature=0, prompt_logprobs=1)
    found = ScoredTexts([], [], [])
    for picture, text in zip(job.pictures, job.texts, strict=True):
        parts = [{"type": "image", "image": picture}, {"type": "text", "text": QUESTION}]
        asked: dict[str, Any] = {"role": "user", "content": parts}
        greedy = SamplingParams(max_tokens=1 if text else MOST_WRITTEN, temperature=0)
        (written,) = llm.chat([asked], greedy, progress=False)
        said = text or written.outputs[0].text.strip()
        if not said:
            raise QuantizeError(f"{picture}: the model writes nothing about it; give it a text")
        turns = [asked, {"role": "assistant", "content": said}]
        (answer,) = llm.chat(turns, scored, progress=False, continue_final_message=True)
        before = _same_start(written.prompt_token_ids, answer.prompt_token_ids)
        reported = answer.prompt_logprobs[before - len(answer.prompt_token_ids) :]
        found.texts.append(said)
        found.logprobs.append([one.chosen.logprob for one in reported])
        found.tops.append([one.top[0].token_id for one in reported])
    llm.close()
    return found


def _same_start(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _answers(llm: LLM, job: AnswerJob) -> list[list[int]]:
    from appliance.engine.nouns.sampling_params import SamplingParams

    prompts = [openings[0] for openings in job.openings]
    sampling = [
        SamplingParams(max_tokens=job.length - len(prompt), temperature=0) for prompt in prompts
    ]
    answers = llm.generate(prompts, sampling, progress=False)
    return [answer.outputs[0].token_ids for answer in answers]


def _rows(llm: LLM, job: AnswerJob, seed: int) -> list[list[int]]:
    """Fill rows: an answer to an opening, the next opening, its answer, and so on."""
    from appliance.engine.nouns.sampling_params import SamplingParams

    rows: list[list[int]] = [[] for _ in job.openings]
    for turn in range(ENDS + 1):
        open_rows = [place for place, row in enumerate(rows) if len(row) < job.length]
        for place in open_rows:
            openings = job.openings[place]
            rows[place] += openings[turn % len(openings)]
            if len(rows[place]) > job.length - LEAST_ANSWER:
                rows[place] += openings[(turn + 1) % len(openings)]
                del rows[place][job.length :]
        left = [place for place in open_rows if len(rows[place]) < job.length]
        sampling = [
            SamplingParams(
                max_tokens=job.length - len(rows[place]),
                seed=(seed * len(rows) + place) * (ENDS + 1) + turn,
                ignore_eos=turn == ENDS or len(job.openings[place]) == 1,
            )
            for place in left
        ]
        answers = llm.generate([rows[place] for place in left], sampling, progress=False)
        for place, answer in zip(left, answers, strict=True):
            rows[place] += answer.outputs[0].token_ids
    return rows


def _cache_bytes(source: ModelSource, length: int, count: int) -> int:
    """Return the bytes of a KV cache that holds all that is answered together."""
    from appliance.model.executor import heads_of

    slots = -(-length // BLOCK_TOKENS) * BLOCK_TOKENS
    elements = sum(2 * num_kv_heads * head_dim for num_kv_heads, head_dim in heads_of(source.spec))
    return min(count, AT_ONCE) * slots * elements * 2


def _check_fits(job: AnswerJob | PictureJob) -> None:
    """Raise MemoryPlanError, before reading weights, if a model and its cache do not fit."""
    import torch

    from appliance.model.size import estimate_native_bytes
    from appliance.model.source import open_model

    source = open_model(Path(job.model))
    weights = estimate_native_bytes(source, torch.bfloat16)
    cache = _cache_bytes(source, job.length, len(job.openings)) if isinstance(job, AnswerJob) else 0
    needed = psutil.Process().memory_info().rss + weights + cache
    if needed > job.most:
        raise MemoryPlanError(_too_much(f"at least {needed / MIB:,.0f}", job.most))


def _too_much(needed: str, most: int) -> str:
    return (
        f"running it takes {needed} MiB of memory, and --max-ram leaves"
        f" {most / MIB:,.0f} MiB for that"
    )


def _watch(most: int) -> None:
    """Exit if the parent is gone or the memory limit is exceeded."""
    process = psutil.Process()
    while not select.select([0], [], [], WATCHED_EVERY)[0]:
        if most and process.memory_info().rss > most:
            message = _too_much(f"more than {most / MIB:,.0f}", most)
            os.write(2, f"\n{message}\n".encode())
            break
    os._exit(1)  # the main thread may be within a step


def _main() -> None:
    content = Path(sys.argv[1]).read_bytes()
    job = msgspec.json.decode(content, type=AnswerJob | PictureJob)
    threading.Thread(target=_watch, args=(job.most,), daemon=True).start()
    try:
        if job.most:
            _check_fits(job)
        done = score_here(job) if isinstance(job, PictureJob) else _written(job)
    except ApplianceError as error:
        sys.exit(str(error))
    sys.stdout.buffer.write(msgspec.json.encode(done) + b"\n")


def _written(job: AnswerJob) -> WrittenRows:
    rows = work_here(job)
    from appliance.quant.run.memory import peak_ram

    return WrittenRows(rows, peak_ram())


if __name__ == "__main__":
    _main()
