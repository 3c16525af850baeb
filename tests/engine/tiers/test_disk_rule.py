"""The disk holds nothing but what `ON_DISK` says, and people are shown those words."""

from __future__ import annotations

import random
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulation.load_script import Setting
from support.simulation.virtual_engine import engine_info
from support.simulation.virtual_model import VOCAB
from support.simulation.virtual_runner import Clock, VirtualRunner
from typer.testing import CliRunner

from appliance.cli import app
from appliance.engine.blocks.block_hashes import block_hash, root_hash
from appliance.engine.blocks.block_manager import BlockManager
from appliance.engine.engine import LLMEngine
from appliance.engine.nouns.moves import Rates
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from appliance.engine.tiers import read_ahead, write_behind
from appliance.engine.tiers.disk_store import DiskStore
from appliance.engine.tiers.disk_tier import DiskTier
from appliance.engine.tiers.tiers import Tiers, TierSizes
from appliance.engine.tiers.write_behind import MIN_TOKENS, ON_DISK, WriteBehind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).parents[3]


@contextmanager
def running(folder: Path, block_size: int, num_blocks: int) -> Iterator[LLMEngine]:
    """An engine without a model, but with a disk."""
    setting = Setting(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        context_length=2048,
        prefix_caching=True,
        sealed=False,
        depth=0,
        host_blocks=num_blocks,
        host_keeps_evicted=False,
        tokens_per_move=1,
        disk_blocks=0,
        searches=0.0,
        admits_eagerly=False,
    )
    blocks = BlockManager(num_blocks, block_size)
    runner = VirtualRunner(
        blocks,
        max_rows=64,
        sealed=False,
        depth=0,
        noise=random.Random(0),
        clock=Clock(),
    )
    block_bytes = 8 * block_size
    store = DiskStore(folder, b"f" * 16, block_bytes, 1 << 30, {})
    store.open()
    disk = DiskTier(store)
    sizes = TierSizes(block_bytes, host_bytes=block_bytes * num_blocks)
    writes = WriteBehind(blocks, disk, runner.save, time.thread_time)
    limits = SchedulerLimits(4, 64, 2048)
    tiers = Tiers(blocks, sizes, Rates(), disk, writes)
    scheduler = Scheduler(blocks, limits, tiers=tiers)
    engine = LLMEngine(scheduler, tiers, runner, engine_info(setting))
    try:
        yield engine
    finally:
        engine.close()


class Conversations:
    """All requests and their answers."""

    def __init__(self) -> None:
        self.requests: list[tuple[int, Request]] = []  # each with its wave
        self.answers: dict[str, dict[int, list[int]]] = {}

    def texts(self, number: int) -> list[list[int]]:
        """Prompt and answer of each choice of a request."""
        request = self.requests[number][1]
        prompt = list(request.prompt_token_ids)
        return [prompt + answer for answer in self.answers[request.request_id].values()] or [prompt]

    def ask(self, engine: LLMEngine, wave: int, requests: Sequence[Request]) -> None:
        """Submit all of them at once, and wait for the answers."""
        for request in requests:
            self.requests.append((wave, request))
            self.answers[request.request_id] = {}
            engine.submit(request)
        while engine.has_work:
            for delta in engine.step().deltas:
                answers = self.answers[delta.request_id]
                answers.setdefault(delta.index, []).extend(delta.token_ids)

    def allowed(self, block_size: int, least: int) -> set[str]:
        """Names of the files that may exist, computed without prefix cache or scheduler."""
        names = set()
        for number, (wave, request) in enumerate(self.requests):
            prompt, shared = list(request.prompt_token_ids), 0
            for other, (before, earlier) in enumerate(self.requests):
                if other == number or before > wave or earlier.cache_salt != request.cache_salt:
                    continue
                shared = max([shared, *(num_common(prompt, text) for text in self.texts(other))])
            num_blocks = shared // block_size
            if num_blocks * block_size < least:
                continue
            parent = root_hash("", request.cache_salt)
            for index in range(num_blocks):
                parent = block_hash(parent, prompt[index * block_size : (index + 1) * block_size])
                names.add(f"{parent.hex()}.kv")
        return names


def num_common(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def request_of(name: str, tokens: Sequence[int], answer: int, **options: object) -> Request:
    n = options.pop("n", 1)
    sampling = SamplingParams(temperature=1.0, seed=1, max_tokens=answer, ignore_eos=True, n=n)  # type: ignore[arg-type]
    return Request(request_id=name, prompt_token_ids=tuple(tokens), sampling=sampling, **options)  # type: ignore[arg-type]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*.kv")}


@settings(max_examples=40)
@given(st.data())
def test_whatever_is_asked_nothing_else_is_on_the_disk(data: st.DataObject) -> None:
    """Short and long prompts and answers, alone or together, after a restart, in a tight cache."""
    size, least = 4, data.draw(st.sampled_from([8, 16, 24]), "least")
    noise = random.Random(data.draw(st.integers(0, 2**16), "tokens"))
    told = Conversations()
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(write_behind, "MIN_TOKENS", least),
        patch.object(read_ahead, "MIN_READ_TOKENS", 4),
    ):
        wave = 0
        for num_blocks in data.draw(st.sampled_from([[200], [40], [60, 60]]), "blocks of engines"):
            with running(Path(folder), size, num_blocks) as engine:
                for _ in range(data.draw(st.integers(1, 4), "waves")):
                    wave += 1
                    asked = []
                    for number in range(data.draw(st.integers(1, 3), "at once")):
                        begin: list[int] = []
                        if told.requests and data.draw(st.sampled_from([False, True]), "goes on"):
                            texts = told.texts(data.draw(st.integers(0, len(told.requests) - 1)))
                            begin = texts[0][: data.draw(st.integers(0, 60), "kept")]
                        own = noise.choices(range(VOCAB), k=data.draw(st.integers(1, 30), "own"))
                        asked.append(
                            request_of(
                                f"{wave}.{number}",
                                [*begin, *own],
                                data.draw(st.integers(1, 40), "answer"),
                                n=data.draw(st.sampled_from([1, 1, 2]), "n"),
                                cache_salt=data.draw(st.sampled_from(["", "", "salt"]), "salt"),
                            )
                        )
                    told.ask(engine, wave, asked)
            assert names(Path(folder)) <= told.allowed(size, least)


def test_short_prompts_leave_nothing_however_long_the_answers_are(tmp_path: Path) -> None:
    noise, told = random.Random(0), Conversations()
    with running(tmp_path, 16, 1024) as engine:
        for number, length in enumerate((42, 60, 75)):
            prompt = noise.choices(range(VOCAB), k=length)
            told.ask(engine, number, [request_of(str(number), prompt, 600)])
    assert not names(tmp_path)


def test_a_load_of_prompts_that_share_nothing_leaves_nothing(tmp_path: Path) -> None:
    noise, told = random.Random(0), Conversations()
    with running(tmp_path, 16, 1024) as engine:
        requests = [request_of(str(n), noise.choices(range(VOCAB), k=500), 4) for n in range(12)]
        told.ask(engine, 0, requests)
    assert not names(tmp_path)


def test_a_beginning_that_came_twice_is_there_up_to_its_last_whole_block(tmp_path: Path) -> None:
    """An agent's next turn repeats its prompt and its answer, and adds new tokens."""
    noise, told = random.Random(0), Conversations()
    first = noise.choices(range(VOCAB), k=250)
    with running(tmp_path, 16, 1024) as engine:
        told.ask(engine, 0, [request_of("first", first, 40)])
        (said,) = told.texts(0)
        told.ask(engine, 1, [request_of("second", said[:-1] + first[:30], 40)])
        shared = (len(said) - 1) // 16
        assert shared * 16 >= MIN_TOKENS > len(first)
        engine.tiers.writes.flush(10.0)  # type: ignore[union-attr]
        assert names(tmp_path) == told.allowed(16, MIN_TOKENS)
        assert len(names(tmp_path)) == shared


@pytest.mark.parametrize(("length", "written"), [(MIN_TOKENS, 0), (MIN_TOKENS + 1, 16)])
def test_the_number_of_the_sentence_is_the_least(tmp_path: Path, length: int, written: int) -> None:
    """A prompt's last token is computed again, so the prompt is one longer than what is shared."""
    prompt, told = random.Random(0).choices(range(VOCAB), k=length), Conversations()
    with running(tmp_path, 16, 1024) as engine:
        for wave in range(2):
            told.ask(engine, wave, [request_of(str(wave), prompt, 4)])
    assert len(names(tmp_path)) == written


def words(text: str) -> str:
    """Without line breaks, frames and emphasis."""
    return " ".join(text.replace("│", " ").replace("*", "").split())


def test_help_and_documentation_say_it_in_these_words() -> None:
    assert str(MIN_TOKENS) in ON_DISK
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).stdout
    assert ON_DISK in words(shown)
    for page in ("README.md", "appliance/docs/memory-and-cache.md"):
        assert ON_DISK in words((ROOT / page).read_text())
