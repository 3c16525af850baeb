"""The engine's own numbers for Prometheus, from its latest report: reading them wakes nobody."""

from __future__ import annotations

import platform
from collections import Counter
from typing import TYPE_CHECKING

from prometheus_client.registry import Collector

from appliance.api_keys import NO_KEY
from appliance.engine.blocks.block_word import count_states
from appliance.engine.process.supervisor import EngineState
from appliance.server.families import counter, gauge, histogram
from appliance.stats import COMPILE_SECONDS
from appliance.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.core import Metric

    from appliance.server.state import ServerState


class EngineCollector(Collector):
    """Reads what the engine reported last, whenever somebody asks."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._labels = {"model_name": state.model_id}

    def collect(self) -> Iterable[Metric]:
        """For the registry."""
        yield from self._counters()
        yield from self._gauges()
        yield from self._requests()
        yield from self._facts()

    def _counters(self) -> Iterator[Metric]:
        stats, engine = self._state.engine.stats, self._state.engine
        for name, text, value in (
            ("vllm:prompt_tokens", "Prompt tokens accepted.", stats.prompt_tokens_total),
            ("vllm:generation_tokens", "Tokens generated.", stats.generation_tokens_total),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_queries_total),
            ("vllm:prefix_cache_hits", "Prompt tokens found.", stats.prefix_hits_total),
            ("vllm:num_preemptions", "Sequences preempted.", stats.preemptions_total),
            ("appliance_engine_steps", "Steps of the engine.", stats.steps_total),
            ("appliance_sequences_aborted", "Sequences aborted.", stats.aborted_total),
            ("appliance_nan_logits", "Sequences ended by broken logits.", stats.nan_logits_total),
            ("appliance_engine_restarts", "Engine processes after the first.", engine.restarts),
            (
                "appliance_grammar_requests",
                "Requests for structured output.",
                stats.grammar_requests_total,
            ),
            (
                "appliance_grammar_cache_hits",
                "Of these, whose grammar was compiled already.",
                stats.grammar_cache_hits_total,
            ),
            ("appliance_swaps", "Preemptions that kept the blocks.", stats.swaps_total),
            (
                "appliance_requests_failed",
                "Requests that ended with an error or without a reader.",
                self._state.metrics.failed,
            ),
            (
                "appliance_log_warnings",
                "Warnings and errors in the log.",
                self._state.warnings.total,
            ),
        ):
            yield counter(name, text, [(self._labels, value)])
        yield histogram(
            "appliance_grammar_compile_seconds",
            "Compiling a grammar in the engine.",
            self._state.model_id,
            COMPILE_SECONDS,
            stats.grammar_compiles or [0] * (len(COMPILE_SECONDS) + 1),
            stats.grammar_compile_seconds_total,
        )
        host, disk = stats.prefix_hits_host_total, stats.prefix_hits_disk_total
        for name, text, label, counts in (
            (
                "appliance_prefix_hit_tokens",
                "Prompt tokens found, by where their blocks were.",
                "tier",
                {"cache": stats.prefix_hits_total - host - disk, "host": host, "disk": disk},
            ),
            (
                "appliance_kv_swapped_blocks",
                "KV blocks to host memory and back.",
                "direction",
                {"out": stats.swapped_out_total, "in": stats.swapped_in_total},
            ),
            (
                "appliance_kv_disk_events",
                "KV files written, read, found damaged, or evicted; blocks that came too late.",
                "event",
                {
                    "written": stats.kv_disk_written_total,
                    "read": stats.kv_disk_read_total,
                    "dropped": stats.kv_disk_dropped_total,
                    "corrupt": stats.kv_disk_corrupt_total,
                    "evicted": stats.kv_disk_evicted_total,
                },
            ),
        ):
            samples = [({**self._labels, label: key}, count) for key, count in counts.items()]
            yield counter(name, text, samples)

    def _gauges(self) -> Iterator[Metric]:
        stats, engine = self._state.engine.stats, self._state.engine
        ready = engine.state is EngineState.READY
        for name, text, value in (
            ("vllm:num_requests_running", "Requests in work.", engine.num_running),
            ("vllm:num_requests_waiting", "Requests in the queue.", engine.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", stats.kv_usage),
            ("appliance_engine_up", "1 while the engine is ready.", float(ready)),
            ("appliance_kv_utilization", "Share of held slots with tokens.", stats.kv_utilization),
            ("appliance_kv_block_slots", "Token slots of a KV block.", stats.block_size),
            ("appliance_sequences_running", "Sequences that hold blocks.", stats.running),
            ("appliance_sequences_waiting", "Sequences that hold none.", stats.waiting),
            ("appliance_sequences_swapped", "Waiting ones with blocks kept.", stats.swapped),
            ("appliance_kv_host_capacity", "KV blocks that fit there.", stats.kv_host_capacity),
            ("appliance_kv_disk_blocks", "KV blocks on the disk.", stats.kv_disk_blocks),
            ("appliance_kv_disk_bytes", "KV files of all models.", stats.kv_disk_bytes),
            ("appliance_kv_disk_capacity_bytes", "Their cap.", stats.kv_disk_capacity_bytes),
            ("appliance_kv_disk_pending", "KV blocks to be written.", stats.kv_disk_pending),
            (
                "appliance_kv_disk_writing",
                "1 while KV blocks are written to a disk, 0 without one or while it refuses.",
                float(stats.kv_disk_writing),
            ),
            ("appliance_queue_limit", "Requests that may wait.", self._state.config.max_queue),
        ):
            yield gauge(name, text, [(self._labels, value)])
        # As the block map has them; there is none before the engine is ready.
        states = {} if engine.metadata is None else count_states(engine.metadata)
        host = {
            "swapped": stats.kv_host_swapped,
            "cached": stats.kv_host_blocks - stats.kv_host_swapped,
        }
        for name, text, counts in (
            (
                "appliance_kv_blocks",
                "KV blocks by state; shared ones stand in more than one block table.",
                states,
            ),
            (
                "appliance_kv_host_blocks",
                "KV blocks in host memory: of preempted sequences, or cached and read ahead.",
                host,
            ),
        ):
            samples = [({**self._labels, "state": state}, count) for state, count in counts.items()]
            yield gauge(name, text, samples)

    def _requests(self) -> Iterator[Metric]:
        # Zeros too, so that no series ends when nobody asks for anything.
        names = self._state.keys() or (NO_KEY,)
        counts = Counter({(name, state): 0 for name in names for state in ("running", "waiting")})
        for request, started in self._state.engine.open_requests():
            counts[request.owner or NO_KEY, "running" if started else "waiting"] += 1
        yield gauge(
            "appliance_requests",
            "Open requests by the name of their key.",
            [
                ({**self._labels, "key": key, "state": state}, count)
                for (key, state), count in sorted(counts.items())
            ],
        )

    def _facts(self) -> Iterator[Metric]:
        build = {"version": __version__, "python": platform.python_version()}
        card = self._state.quality_card
        facts = () if card is None else card.facts
        yield gauge("appliance_build_info", "What is running.", [(build, 1)])
        yield gauge(
            "appliance_quality",
            "The quality card of the model: what quantizing its weights cost.",
            [({**self._labels, "fact": one.name}, one.value) for one in facts],
        )
        info = self._state.engine.info
        if info is None:
            return
        cache = {
            "block_size": str(info.block_size),
            "cache_dtype": info.kv_format,
            "num_gpu_blocks": str(info.num_blocks),
        }
        yield gauge("vllm:cache_config_info", "The KV cache.", [({**self._labels, **cache}, 1)])
        model = {
            "architecture": info.architecture,
            "backend": info.backend,
            "device": info.device,
            "kv_format": info.kv_format,
            "weight_format": info.weight_format,
        }
        yield gauge("appliance_model_info", "The model.", [({**self._labels, **model}, 1)])
        plan = {
            "weights": info.weight_bytes,
            "kv_cache": info.kv_bytes,
            "workspace": info.workspace_bytes,
            "process": info.process_bytes,
            "kv_host": info.kv_host_bytes,
            "budget": info.memory_bytes,
        }
        yield gauge(
            "appliance_memory_planned_bytes",
            "How memory was divided before the model was loaded.",
            [({**self._labels, "part": part}, size) for part, size in plan.items()],
        )
        yield gauge(
            "appliance_context_tokens",
            "Tokens of one sequence, prompt and answer together.",
            [(self._labels, info.context_length)],
        )
        yield gauge("appliance_load_seconds", "The last load.", [(self._labels, info.load_seconds)])
