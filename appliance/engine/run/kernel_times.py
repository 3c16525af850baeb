"""Times the kernels of a decoder on its card, see `kernels.gpu.timed`."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.gpu.timed import Timer, missing, time_choices, use_choices

if TYPE_CHECKING:
    from appliance.kernels.gpu.timed import Timeable, TimedChoices
    from appliance.model.decoder import Decoder

REPEATS = 5  # of a measurement, whose median counts
MOST_WORKS = 4  # of one form, one after another
FLUSH_BYTES = 256 << 20  # more than any card's second-level cache
MOST_FLUSHES = 64
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PartTimes:
    """Timed choices for the kernels of a model, or of a rank's part of it.

    Attributes:
        wanted: entries and forms of all that can be timed, see `missing`.
        choices: by the names of forms.
    """

    wanted: tuple[tuple[int, str], ...]
    choices: dict[str, TimedChoices]


def time_kernels(
    decoder: Decoder,
    most_rows: int,
    seconds: float,
    known: Mapping[str, TimedChoices],
    kv_format: KVFormat,
    on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> PartTimes:
    """Let a decoder on a GPU use what is known, and time what is missing.

    Args:
        decoder: on a GPU.
        most_rows: of a step.
        seconds: to time for, at most; see `Timer`.
        known: choices by the names of forms.
        kv_format: of most layers' cache.
        on_progress: called with stage, done, total.
    """
    works = list(works_of(decoder, kv_format))
    clock, calls = CardClock(decoder.device, decoder.dtype), 0

    def measured(members: Sequence[Timeable], entry: int) -> float | None:
        nonlocal calls
        calls += 1
        on_progress("timing tiles", calls, 0)
        return clock.seconds(members, entry)

    found = time_choices(works, most_rows, Timer(measured, seconds), known)
    if calls:
        torch.cuda.empty_cache()
    return PartTimes(tuple(missing(works, most_rows, {})), found)


def use_timed(decoder: Decoder, choices: Mapping[str, TimedChoices], kv_format: KVFormat) -> None:
    """Let a decoder use choices by the names of forms; what they lack is computed."""
    use_choices(works_of(decoder, kv_format), choices)


def attention_of(decoder: Decoder, kv_format: KVFormat) -> Iterator[Timeable]:
    """Yield the attention of a decoder's first layer that sees its whole context, if any does.

    All layers have the same spans. Those of latents stay computed.
    """
    from appliance.kernels.attention.timed_spans import SpanPlanner, TimedAttention

    planner = decoder.backend.plan_attention
    if not isinstance(planner, SpanPlanner) or kv_format is KVFormat.FP32:
        return
    for mixer in decoder.spec.attention_layers.values():
        if mixer.window is None and mixer.chunk is None:
            yield TimedAttention(
                planner,
                kv_format,
                mixer.num_heads,
                mixer.num_kv_heads,
                mixer.head_dim,
                mixer.softcap,
                decoder.spec.context_length,
            )
            return


def works_of(decoder: Decoder, kv_format: KVFormat) -> Iterator[Timeable]:
    """Yield what can be timed in a decoder's layers and head, and in its layers for prompts."""
    from appliance.kernels.fp8_matmul.launch import Fp8Linear
    from appliance.kernels.fp8_matmul.timed_linear import TimedFp8Linear
    from appliance.kernels.grouped_matmul.launch import ExpertMLPs
    from appliance.kernels.grouped_matmul.timed_experts import TimedExperts
    from appliance.kernels.int8_matmul.launch import PromptLinear
    from appliance.kernels.int8_matmul.timed_prompts import TimedPrompts
    from appliance.kernels.packed_matmul.launch import TiledLinear
    from appliance.kernels.packed_matmul.timed_linear import TimedLinear
    from appliance.model.experts import Experts

    def inside(value: Any) -> Iterator[Timeable]:
        if isinstance(value, TiledLinear):
            yield TimedLinear(value)
        elif isinstance(value, PromptLinear):
            yield TimedPrompts(value)
        elif isinstance(value, Fp8Linear):
            yield TimedFp8Linear(value)
        elif is_dataclass(value):
            if isinstance(value, Experts) and isinstance(value.grouped, ExpertMLPs):
                router = value.router
                yield TimedExperts(
                    value.grouped, router.num_experts, router.top_k, value.num_shared
                )
            for each in fields(value):
                yield from inside(getattr(value, each.name))
        elif isinstance(value, tuple | list):
            for one in value:
                yield from inside(one)

    yield from inside((decoder.layers, decoder.head))
    yield from attention_of(decoder, kv_format)
    if decoder.prompts is not None:
        works = inside(decoder.prompts.behind(0))
        yield from (work for work in works if isinstance(work, TimedPrompts))


class CardClock:
    """Times works on a GPU.

    Weights come from memory, as in a step: before each repeat the caches are filled with something
    else. That takes longer than the host needs to launch the works, so its time does not count.

    Args:
        device: the GPU.
        dtype: of activations.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._filler: torch.Tensor | None = None
        self._flush_seconds = 0.0

    def seconds(self, members: Sequence[Timeable], entry: int) -> float | None:
        """Return the time of works of one form; None if a kernel cannot run, or memory is short."""
        from triton.runtime.errors import TritonError

        try:
            return self._median(members[:MOST_WORKS], entry)
        except (TritonError, RuntimeError) as error:  # a server starts all the same
            expected = isinstance(error, TritonError | torch.OutOfMemoryError)
            level = logging.DEBUG if expected else logging.WARNING
            logger.log(level, "%s at %d is not timed: %s", members[0].name, entry, error)
            return None

    def _median(self, members: Sequence[Timeable], entry: int) -> float:
        inputs = members[0].inputs(entry, self._dtype, self._device)

        def run() -> None:
            for work in members:
                work.run(*inputs)

        if self._filler is None:
            self._filler = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self._device)
            self._flush()  # loads its kernel
            self._flush_seconds = median(self._between(self._flush) for _ in range(REPEATS))
        run()  # compiles and loads kernels
        begin = time.perf_counter()
        run()
        launching = time.perf_counter() - begin
        flushes = min(MOST_FLUSHES, 1 + math.ceil(launching / max(self._flush_seconds, 1e-6)))
        return median(self._between(run, flushes) for _ in range(REPEATS))

    def _between(self, run: Callable[[], None], flushes: int = 0) -> float:
        """Return the seconds between two events around some work, behind so many flushes."""
        for _ in range(flushes):
            self._flush()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def _flush(self) -> None:
        assert self._filler is not None
        self._filler.zero_()
