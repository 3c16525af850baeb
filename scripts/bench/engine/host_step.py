"""Measure the host's time for a decode step beside a GPU, by batch and sampling settings.

    scripts/benchmark host_step  # about two minutes
    scripts/benchmark host_step --batches 16 --settings greedy --profile

The engine runs on a device that executes nothing: the model and the sampling kernels return at
once, and a graph's replay is an empty call. That leaves the host's work for a step, from the plan
to the encoded report of its tokens, in CPU milliseconds of one thread. It leaves out the CUDA
driver's time for each copy, kernel and graph, so these are counted.

The device runs the step before meanwhile, which hides all of this work, except with `drafts`: a
step after drafts is planned once these are verified, so the device waits for the host. By part:

    plan    the scheduler's decision
    stage   writing the step's inputs into the buffer that is copied to the device
    launch  enqueueing the rest of the step up to the logits
    sample  sampling outside of the graph
    read    tokens and log probabilities of the step before as Python objects
    commit  the scheduler's state and the deltas
    report  encoding the deltas
    other   the engine's statistics
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from appliance.bench.figures import percentile
from appliance.engine.blocks.block_manager import BlockManager
from appliance.engine.engine import LLMEngine
from appliance.engine.grammars.matchers import Matchers
from appliance.engine.nouns.messages import EngineInfo
from appliance.engine.nouns.moves import Rates
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.process.framing import encode_frame
from appliance.engine.run import model_runner
from appliance.engine.run.batch import stage
from appliance.engine.run.cuda_graphs import MOST_ROWS, PROMPTS, StepSize
from appliance.engine.run.geometry import Spare
from appliance.engine.run.host_device import HostDevice
from appliance.engine.run.model_runner import ModelRunner
from appliance.engine.run.moves import HostMoves
from appliance.engine.run.prompt_reader import PromptReader
from appliance.engine.run.sampler import Sampler
from appliance.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from appliance.engine.speculation.controller import RowCosts
from appliance.engine.speculation.proposal import Proposal
from appliance.engine.speculation.speculator import Speculator
from appliance.engine.speculation.suffix import SuffixProposer
from appliance.engine.tiers.tiers import Tiers
from appliance.kernels.token_scores.reference import score_tokens
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions

if TYPE_CHECKING:
    from collections.abc import Sequence as Ordered

    from numpy.typing import NDArray

    from appliance.engine.nouns.sequence import Sequence
    from appliance.engine.run.device import Event, Graph

BLOCK_SIZE = 32  # as on CUDA
VOCABULARY = 4096  # little arithmetic, and about as many different tokens as a long prompt has
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
    "penalties": {
        "temperature": 0.8,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
    },
    "bias": {"temperature": 0.8, "logit_bias": dict.fromkeys(range(8), -1.0)},
    "logprobs": {"temperature": 0.8, "logprobs": 5},
    "drafts": {"temperature": 0.0},
}
MOST_DRAFTING = 16  # sequences; with more there is hardly room for drafts
# Log probabilities are computed outside of the graph, so they get a vocabulary that is little work.
VOCABULARIES = {"logprobs": 64}
TOKEN = 7  # of all answers
TOKENS = (1, MOST_ROWS)  # most of a step, without drafts and with some
PARTS = ("plan", "stage", "launch", "sample", "read", "commit", "report", "other")
ENQUEUED = (
    "copies to the device", "copies to the host", "replays", "kernels", "operators",
    "views", "events",
)  # fmt: skip
SAMPLING_KERNELS = 5  # of one call
GOALS_MS = {
    (16, "greedy"): 0.5,
    (16, "top-p"): 0.5,
    (16, "penalties"): 1.0,
    (256, "greedy"): 3.0,
    (256, "top-p"): 3.0,
}


class NoDevice(HostDevice):
    """A device that executes nothing and counts what is enqueued."""

    is_asynchronous = True

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.memory: set[int] = set()  # addresses of pinned buffers

    def pinned(self, num_bytes: int) -> Tensor:
        memory = super().pinned(num_bytes)
        self.memory.add(memory.data_ptr())
        return memory

    def send(self, array: NDArray[Any]) -> Tensor:
        self.counts["copies to the device"] += 1
        return self.view(array)

    def fetch(self, tensor: Tensor) -> Tensor:
        self.counts["copies to the host"] += 1
        return tensor

    def record(self) -> Event:
        self.counts["events"] += 1
        return super().record()

    def capture(self, function: Callable[[], None]) -> Graph:
        function()
        return NoGraph(self.counts)


class NoGraph:
    """A graph whose replay is only counted."""

    def __init__(self, counts: Counter[str]) -> None:
        self.counts = counts

    def replay(self) -> None:
        self.counts["replays"] += 1


class Operators(TorchDispatchMode):
    """Counts torch's operators outside of graphs; views, which enqueue nothing, separately."""

    def __init__(self, device: NoDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.is_view:
            self.device.counts["views"] += 1
        elif name == "copy_" and args[1].untyped_storage().data_ptr() in self.device.memory:
            self.device.counts["copies to the device"] += 1
        else:
            self.device.counts["operators"] += 1
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


class Stub:
    """A model, its cache and the kernels that sample, which all return at once."""

    device = torch.device("cpu")
    block_size = BLOCK_SIZE
    block_bytes, open_bytes = 1, 0

    def __init__(self, rows: int, vocab_size: int, counts: Counter[str]) -> None:
        self.spec = SimpleNamespace(vocab_size=vocab_size, has_axes=False)
        self.logits = torch.zeros(rows, vocab_size)
        self.tokens = torch.full((rows,), TOKEN)
        self.counts = counts

    def forward(self, token_ids: Tensor, *arguments: Any) -> Tensor:
        """Return the same logits for all rows."""
        rows = arguments[3] if len(arguments) > 3 else None
        return self.logits[: len(token_ids if rows is None else rows)]

    def sample_tokens(self, logits: Tensor, rows: Any) -> Tensor:
        """Return the same token for all rows."""
        self.counts["kernels"] += SAMPLING_KERNELS
        return self.tokens[: len(logits)]

    def penalize(self, *arguments: Any, is_counted: bool = False) -> None:
        self.counts["kernels"] += 1


class Same(SuffixProposer):
    """Reads answers as usual, and proposes the token that the model repeats."""

    def propose(self, answers: Ordered[tuple[Sequence, int]]) -> dict[Sequence, Proposal]:
        """Propose the most tokens for each answer."""
        super().propose(answers)
        return {one: Proposal((TOKEN,) * most, "suffix", 32) for one, most in answers}


class FreeRows(RowCosts):
    """Rows that cost nothing, so that all drafts are run."""

    def seconds(self, rows: int) -> float:
        return 1.0


class Stopwatch:
    """CPU seconds of a step by part, without those of the parts inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def watch(self, owner: Any, method: str, part: str) -> None:
        """Time a method of an object from now on."""
        setattr(owner, method, self.timed(getattr(owner, method), part))

    def timed(self, work: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Wrap a function so that its calls are timed."""

        def timed(*arguments: Any, **named: Any) -> Any:
            self._inner.append(0.0)
            begin = time.thread_time()
            result = work(*arguments, **named)
            seconds = time.thread_time() - begin
            self.seconds[part] += seconds - self._inner.pop()
            self._inner[-1] += seconds
            return result

        return timed


def build(
    batch: int, context: int, vocab_size: int, *, drafts: bool = False
) -> tuple[LLMEngine, NoDevice]:
    device = NoDevice()
    # All prompts at once.
    limits = SchedulerLimits(batch, batch * context, 2 * context, verifies=drafts)
    num_blocks = 2 * batch * context // BLOCK_SIZE
    rows = max(batch + PROMPTS, limits.sample_rows)
    stub: Any = Stub(rows, vocab_size, device.counts)
    runner: ModelRunner[Any] = ModelRunner(
        stub,
        stub,
        Sampler(
            (),
            stub.sample_tokens,
            stub.penalize,
            device,
            num_slots=batch,
            vocab_size=vocab_size,
        ),
        device,
        limits,
        HostMoves(stub, Rates()),
        PromptReader(stub, score_tokens, device),
        spare=Spare(num_blocks),
        graph_bytes=1 << 30,
    )
    runner.capture(lambda stage, done, total: None)
    blocks = BlockManager(num_blocks, BLOCK_SIZE, prefix_caching=False)
    info = EngineInfo(
        model="none", architecture="none", device="none", backend="none", weight_format="none",
        kv_format="none", context_length=2 * context, vocab_size=vocab_size, eos_token_ids=(),
        block_size=BLOCK_SIZE, num_blocks=num_blocks, max_num_seqs=batch, weight_bytes=0,
        kv_bytes=0, workspace_bytes=0, memory_bytes=0, load_seconds=0.0, fingerprint="none",
    )  # fmt: skip
    tiers = Tiers.none(blocks)
    speculator = None
    if drafts:
        speculator = Speculator((Same(),), Matchers(vocab_size, ()), MOST_ROWS - 1)
        speculator.controller.costs = speculator.controller.ahead_costs = FreeRows()
    scheduler = Scheduler(blocks, limits, look_ahead=True, tiers=tiers, speculator=speculator)
    return LLMEngine(scheduler, tiers, runner, info), device


def decoding(batch: int, setting: str, context: int) -> tuple[LLMEngine, NoDevice]:
    """Return an engine that decodes all its requests by replaying a graph."""
    vocab_size = VOCABULARIES.get(setting, VOCABULARY)
    drafts = setting == "drafts"
    engine, device = build(batch, context, vocab_size, drafts=drafts)
    sampling = SamplingParams(max_tokens=None, ignore_eos=True, **SETTINGS[setting])
    noise = random.Random(batch)
    for number in range(batch):
        prompt = tuple(noise.randrange(vocab_size) for _ in range(context))
        engine.submit(Request(request_id=f"{number}", prompt_token_ids=prompt, sampling=sampling))
    while engine.stats().waiting:
        engine.step()
    for _ in range(8):
        engine.step()
    assert bool(engine.stats().draft_tokens_total) == drafts
    assert StepSize(batch) in engine.runner.graphs.captured  # type: ignore[attr-defined]
    return engine, device


def one_step(engine: LLMEngine, encode: Callable[[Any], bytearray]) -> None:
    """Call the engine until it reports a step's tokens."""
    while engine.has_work:
        report = engine.step()
        encode(report)
        if report.deltas:
            return
    raise SystemExit(
        "all answers reached the context's end; give longer --contexts or less --steps"
    )


def measure(batch: int, setting: str, context: int, steps: int) -> dict[str, Any]:
    """Measure one row of the result."""
    engine, device = decoding(batch, setting, context)
    one_step(engine, encode_frame)
    device.counts.clear()
    with Operators(device) as operators:
        one_step(engine, encode_frame)
    enqueued = {name: device.counts[name] for name in ENQUEUED} | {"by_name": operators.names}
    watch = Stopwatch()
    runner: Any = engine.runner
    watch.watch(engine.scheduler, "plan", "plan")
    watch.watch(runner, "launch", "launch")
    vars(model_runner)["stage"] = watch.timed(stage, "stage")
    watch.watch(runner._sampler, "launch", "sample")
    watch.watch(runner, "collect", "read")
    watch.watch(engine, "_commit", "commit")
    encode = watch.timed(encode_frame, "report")
    step = watch.timed(lambda: one_step(engine, encode), "other")
    rows: list[dict[str, float]] = []
    for _ in range(steps):
        watch.seconds = defaultdict(float)
        step()
        rows.append(watch.seconds)
    totals = [1000 * sum(row.values()) for row in rows]
    return {
        "batch": batch,
        "setting": setting,
        "context": context,
        "ms": round(statistics.median(totals), 3),
        "ms_p99": round(percentile(totals, 0.99), 3),
        "goal_ms": GOALS_MS.get((batch, setting)),
        "ms_by_part": {
            part: round(statistics.median(1000 * row[part] for row in rows), 4) for part in PARTS
        },
        "enqueued": enqueued,
    }


def profile(batch: int, setting: str, context: int, steps: int) -> None:
    """Print where the time goes, function by function."""
    engine, _ = decoding(batch, setting, context)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        one_step(engine, encode_frame)
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--profile", action="store_true", help="print where the time goes instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()  # an engine between two requests collects hardly any garbage, too
    cases = [
        (batch, setting, context, min(options.steps, context // 2 // TOKENS[setting == "drafts"]))
        for setting in options.settings
        for context in options.contexts
        for batch in options.batches
        if setting != "drafts" or batch <= MOST_DRAFTING
    ]
    if options.profile:
        for case in cases:
            profile(*case)
        return
    result = {
        "benchmark": "host_step",
        "conditions": conditions(),
        "steps": options.steps,
        "rows": [measure(*case) for case in cases],
    }
    write_result(options.out, result)
