"""An engine that repeats its prompt, run in place of the real one: same interface, no torch.

Tests, and benchmarks of the API process alone, start it as a program. Its knobs are the first
argument if that is no flag, else `EngineConfig.model`:

- "step_seconds=0.01": the time from step to step
- "holds_at=9": no sequence gets beyond 9 tokens, its prompt's among them, until it is ended from
  outside or the file of "until=PATH" exists, so that what a test does meanwhile is in time on any
  machine
- "holds_behind=x": holds answers that end with that text
- "script=PATH": answers by the rules of that file, see `echo_script`
- "tokens_per_step=4": a step adds so many tokens, as one that verifies drafts does

Prompts that contain one of the trigger tokens make it misbehave.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from support.echo.echo_reports import pooled
from support.echo.echo_script import Script
from support.echo.echo_sequence import EchoSequence

from appliance.engine.blocks.block_metadata import BlockMetadata
from appliance.engine.nouns.messages import (
    AdapterAnswer,
    EngineInfo,
    SequenceDelta,
    StepReport,
    Table,
    Vocabulary,
)
from appliance.engine.nouns.request import AdapterRef, FinishReason, Request
from appliance.engine.process.worker import run_engine_process
from appliance.errors import MemoryPlanError, RequestError
from appliance.events import BlockState
from appliance.stats import EngineStats, SequenceView, StepView

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.config import EngineConfig
    from appliance.engine.memory.admission import Admission
    from appliance.engine.nouns.beacon import Beacon
    from appliance.engine.process.worker import LoadEngine

VOCAB_SIZE = 272
HIDDEN_SIZE = 8
DIE = 264  # the process kills itself as soon as it runs this request
REFUSE = 265  # submit raises RequestError
BREAK = 266  # submit raises something else
HANG = 267  # the step never ends
FAIL = 268  # the request ends with an error delta
BUSY = 269  # the step computes for `busy_seconds`, and reports progress meanwhile if `advances=1`
TRIGGERS = {DIE, REFUSE, BREAK, HANG, FAIL, BUSY}

given_knobs: str | None = None


class EchoEngine:
    def __init__(
        self,
        config: EngineConfig,
        eos_token_ids: tuple[int, ...],
        metadata: memoryview | None,
        beacon: Beacon,
        text: str,
    ) -> None:
        knobs = dict(pair.split("=") for pair in text.split() if "=" in pair)
        self.holds_at = int(knobs.get("holds_at", "1000000"))
        self.holds_behind = tuple(knobs.get("holds_behind", "").encode())
        self.until = knobs.get("until", "")
        self.step_seconds = float(
            knobs.get("step_seconds", "0.002" if "holds_at" in knobs else "0")
        )
        self.next_step = 0.0  # when the step begins
        script = knobs.get("script")
        self.script = Script(None if script is None else Path(script))
        self.busy_seconds = float(knobs.get("busy_seconds", "1000"))
        self.advances = "advances" in knobs
        self.tokens_per_step = int(knobs.get("tokens_per_step", "1"))
        self.chunk = config.max_num_batched_tokens
        self.max_running = config.max_num_seqs
        self.eos = set(eos_token_ids)
        self.block_size = config.block_size or 16
        self.num_blocks = int(knobs.get("num_blocks", "256"))
        self.context = config.max_model_len or 512
        self.metadata = BlockMetadata(metadata, num_blocks=self.num_blocks)
        self.beacon = beacon
        self.free = list(reversed(range(self.num_blocks)))
        self.waiting: deque[EchoSequence] = deque()
        self.running: list[EchoSequence] = []
        self.seen: set[tuple[str, tuple[int, ...]]] = set()
        self.vocabulary: Vocabulary | None = None  # without it no request may have a grammar
        self.steps = self.prompt_tokens = self.generated = self.aborted = 0
        self.slots = list(reversed(range(1, 1000)))
        self.views: list[StepView] = []
        self.answers: list[AdapterAnswer] = []
        vocab_size = int(knobs.get("vocab_size", VOCAB_SIZE))
        self.info = EngineInfo(
            model="echo", architecture="echo", device="CPU, 1 thread of 1", backend="none",
            weight_format="none", kv_format="none", context_length=self.context,
            vocab_size=vocab_size, eos_token_ids=eos_token_ids, block_size=self.block_size,
            num_blocks=self.num_blocks, max_num_seqs=self.max_running, weight_bytes=0,
            kv_bytes=0, workspace_bytes=0, memory_bytes=0, load_seconds=0.0, fingerprint="echo",
            hidden_size=HIDDEN_SIZE,
        )  # fmt: skip

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.answers)

    def load_adapter(self, ref: AdapterRef) -> None:
        error = "it holds NaN" if "broken" in ref.path else ""
        self.answers.append(AdapterAnswer(ref, error))

    def unload_adapter(self, ref: AdapterRef) -> None:
        assert ref.stamp

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def submit(self, request: Request) -> None:
        assert request.sampling.grammar is None or self.vocabulary is not None
        if REFUSE in request.prompt_token_ids:
            raise RequestError("refused at the engine's door", param="prompt")
        if BREAK in request.prompt_token_ids:
            raise ValueError("broken by this request")
        says = self.script.tokens(request.prompt_token_ids, self.info.eos_token_ids[0])
        for index in range(request.sampling.num_choices):
            self.waiting.append(EchoSequence(request, index, slot=0, says=says))

    def abort(self, request_id: str, index: int | None = None) -> bool:
        found = [
            sequence
            for sequence in [*self.waiting, *self.running]
            if sequence.request.request_id == request_id and index in (None, sequence.index)
        ]
        for sequence in found:
            self.aborted += 1
            self.finish(sequence)
        return bool(found)

    def finish(self, sequence: EchoSequence) -> None:
        for block in sequence.blocks:
            self.metadata.write(block, BlockState.FREE)
        self.free += sequence.blocks
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self.slots.append(sequence.slot)

    def step(self) -> StepReport:
        # Uses select: the soak's libfaketime breaks sleeps until a monotonic time.
        select.select([], [], [], max(0.0, self.next_step - time.monotonic()))
        self.next_step = time.monotonic() + self.step_seconds
        self.steps += 1
        expired = self.expire()
        started: list[str] = []
        while self.waiting and len(self.running) < self.max_running:
            sequence = self.waiting.popleft()
            sequence.slot = self.slots.pop()
            self.running.append(sequence)
            prompt = sequence.request.prompt_token_ids
            if DIE in prompt:
                self.beacon.start([*started, sequence.request.request_id])
                os.kill(os.getpid(), signal.SIGKILL)
            self.prompt_tokens += len(prompt)
            content = (sequence.request.cache_salt, prompt)
            sequence.cached = len(prompt) // 16 * 16 if content in self.seen else 0
            self.seen.add(content)
            if sequence.request.request_id not in started:
                started.append(sequence.request.request_id)
        if started:
            self.beacon.start(started)
        deltas = tuple(
            delta for sequence in list(self.running) if (delta := self.advance(sequence))
        )
        self.views.append(StepView(self.steps, 0, len(deltas), len(deltas), self.step_seconds))
        if self.steps == 1:
            logging.getLogger("appliance.echo").warning("the first step of an echo")
        answers, self.answers = tuple(self.answers), []
        return StepReport((*expired, *deltas), tuple(started), adapters=answers)

    def expire(self) -> list[SequenceDelta]:
        deltas = []
        for sequence in [*self.waiting, *self.running]:
            request, age = sequence.request, time.monotonic() - sequence.arrival
            if sequence in self.running:
                if age < (request.timeout or age + 1):
                    continue
                delta = sequence.delta((), FinishReason.TIMEOUT)
            else:
                if age < min(request.timeout or age + 1, request.max_queue_seconds or age + 1):
                    continue
                delta = sequence.delta((), FinishReason.ERROR, "waited for too long")
            deltas.append(msgspec.structs.replace(delta, expired=delta.error is not None))
            self.finish(sequence)
        return deltas

    def is_held(self, sequence: EchoSequence) -> bool:
        far = sequence.computed + sequence.output >= self.holds_at
        if self.holds_behind:
            begin = max(0, sequence.output - len(self.holds_behind))
            far = far or sequence.says[begin : sequence.output] == self.holds_behind
        return far and not os.path.exists(self.until)

    def advance(self, sequence: EchoSequence) -> SequenceDelta | None:
        if self.is_held(sequence):
            return None
        request = sequence.request
        prompt = request.prompt_token_ids
        if HANG in prompt:
            time.sleep(1000)
        if BUSY in prompt:
            end = time.monotonic() + self.busy_seconds
            while time.monotonic() < end:
                if self.advances:
                    self.beacon.advance()
        sequence.computed = min(len(prompt), sequence.computed + self.chunk)
        while len(sequence.blocks) * self.block_size < sequence.computed + sequence.output + 1:
            block = self.free.pop()
            self.metadata.write(block, BlockState.ACTIVE, owner=sequence.slot, references=1)
            sequence.blocks.append(block)
        if sequence.computed < len(prompt) or self.is_held(sequence):
            return None
        if FAIL in prompt:
            self.finish(sequence)
            return sequence.delta((), FinishReason.ERROR, "no valid token")
        if request.sampling.max_tokens == 0:
            self.finish(sequence)
            delta = sequence.delta((), FinishReason.LENGTH)
            return msgspec.structs.replace(delta, pooled=pooled(request), queue_seconds=0.001)
        run: list[int] = []
        reason = None
        while reason is None and len(run) < self.tokens_per_step:
            token, reason = self.next_token(sequence)
            run.append(token)
        sequence.drafts += self.tokens_per_step - 1
        sequence.accepted += len(run) - 1
        if reason is not None:
            self.finish(sequence)
        return sequence.delta(tuple(run), reason)

    def next_token(self, sequence: EchoSequence) -> tuple[int, FinishReason | None]:
        says, request = sequence.says, sequence.request
        token = says[(sequence.output + sequence.index) % len(says)]
        if (budget := request.sampling.thought_budget) is not None:
            said = [says[(n + sequence.index) % len(says)] for n in range(sequence.output)]
            forced = budget.forces(said, sequence.output)
            token = token if forced is None else forced
        sequence.output += 1
        self.generated += 1
        reason = None
        stops = self.eos | set(request.sampling.stop_token_ids)
        early = sequence.output <= request.sampling.min_tokens
        if token in stops and not request.sampling.ignore_eos and not early:
            reason = FinishReason.STOP
        elif sequence.output == request.sampling.max_tokens:
            reason = FinishReason.LENGTH
        return token, reason

    def take_steps(self) -> tuple[StepView, ...]:
        views, self.views = tuple(self.views), []
        return views

    def block_table(self, request_id: str, index: int) -> Table:
        for sequence in self.running:
            if (sequence.request.request_id, sequence.index) == (request_id, index):
                return sequence.table(self.block_size)
        return Table(request_id=request_id, index=index)

    def close(self) -> None:
        pass

    def stats(self) -> EngineStats:
        return EngineStats(
            steps_total=self.steps,
            running=len(self.running),
            waiting=len(self.waiting),
            prompt_tokens_total=self.prompt_tokens,
            generation_tokens_total=self.generated,
            aborted_total=self.aborted,
            blocks_total=self.num_blocks,
            blocks_active=self.num_blocks - len(self.free),
            blocks_free=len(self.free),
            block_size=self.block_size,
        )

    def sequences(self) -> tuple[SequenceView, ...]:
        return tuple(sequence.view() for sequence in [*self.running, *self.waiting])


def load(
    config: EngineConfig,
    *,
    eos_token_ids: Callable[[], tuple[int, ...]],
    metadata: memoryview | None,
    on_progress: Callable[[str, int, int], None],
    beacon: Beacon,
    admission: Admission,
) -> EchoEngine:
    text = config.model if given_knobs is None else given_knobs
    knobs = text.split()
    numbers = dict(pair.split("=") for pair in knobs if "=" in pair)
    needed, free = int(numbers.get("needs", "0")), int(numbers.get("free", str(2**40)))
    if admission.limit is not None and needed > admission.limit:
        raise MemoryPlanError(f"this does not fit: {needed} of {admission.limit} may be used")
    admission.ask(needed, free)
    if "does_not_fit" in knobs:
        raise MemoryPlanError("the model needs 9 GiB and 1 GiB is free; use a smaller one")
    if "breaks" in knobs:
        raise ValueError("a bug")
    if "dies" in knobs:
        os._exit(7)
    if "refuses_while=" in text and os.path.exists(text.partition("refuses_while=")[2].split()[0]):
        raise MemoryPlanError("the memory of the engine before is not free yet")
    on_progress("reading weights", 1, 2)
    while os.path.exists(numbers.get("loads_after", "")):
        time.sleep(0.01)
    if "slow_load" in knobs:
        time.sleep(1000)
    on_progress("reading weights", 2, 2)
    return EchoEngine(config, eos_token_ids(), metadata, beacon, text)


def find_loader() -> LoadEngine:
    return load


def main(arguments: list[str]) -> int:
    global given_knobs
    if not arguments[0].startswith("--"):
        given_knobs = arguments.pop(0)
    return run_engine_process(arguments, find_loader)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
