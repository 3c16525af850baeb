"""Exports the engine's latest report to Prometheus; scraping never wakes the engine."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from prometheus_client.registry import Collector

from appliance.config.api_keys import NO_KEY
from appliance.engine.blocks.block_metadata import count_states
from appliance.engine.process.supervisor import EngineState
from appliance.server.metrics.metric_families import counter, gauge, histogram
from appliance.stats import COMPILE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client.core import Metric

    from appliance.engine.process.replica_set import ServedEngine
    from appliance.events import QualityFact
    from appliance.server.metrics.metrics import Metrics


class EngineCollector(Collector):
    """Collects one model's metrics.

    Args:
        metrics: the API process's counts for the model.
        max_queue: requests that may wait.
        key_names: returns the names of all keys.
        quality_facts: returns the figures of the model's quality card.
    """

    def __init__(
        self,
        engine: ServedEngine,
        metrics: Metrics,
        max_queue: int,
        key_names: Callable[[], Iterable[str]],
        quality_facts: Callable[[], Iterable[QualityFact]],
    ) -> None:
        self._engine, self._metrics, self._max_queue = engine, metrics, max_queue
        self._key_names, self._quality_facts = key_names, quality_facts
        self._labels = {"model_name": metrics.model_name}

    def collect(self) -> Iterable[Metric]:
        yield from self._counters()
        yield from self._gauges()
        yield from self._requests()
        yield from self._facts()

    def _counters(self) -> Iterator[Metric]:
        stats, engine = self._engine.stats, self._engine
        for name, text, value in (
            ("vllm:prompt_tokens", "Prompt tokens accepted.", stats.prompt_tokens_total),
            ("vllm:generation_tokens", "Tokens generated.", stats.generation_tokens_total),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_queries_total),
            ("vllm:prefix_cache_hits", "Prompt tokens found.", stats.prefix_hits_total),
            ("vllm:num_preemptions", "Sequences preempted.", stats.preemptions_total),
            ("vllm:spec_decode_num_drafts", "Drafts verified.", stats.drafts_total),
            (
                "vllm:spec_decode_num_draft_tokens",
                "Tokens of these drafts.",
                stats.draft_tokens_total,
            ),
            (
                "vllm:spec_decode_num_accepted_tokens",
                "Of these, accepted.",
                stats.accepted_tokens_total,
            ),
            ("appliance_engine_steps", "Steps of the engine.", stats.steps_total),
            ("appliance_sequences_aborted", "Sequences aborted.", stats.aborted_total),
            ("appliance_nan_logits", "Sequences ended by broken logits.", stats.nan_logits_total),
            ("appliance_engine_restarts", "Engine processes after the first.", engine.restarts),
            (
                "appliance_engine_wakes",
                "Engine processes started after a sleep.",
                engine.wakes.number,
            ),
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
            (
                "appliance_pictures_encoded",
                "Pictures that the tower turned into rows.",
                stats.pictures_encoded_total,
            ),
            (
                "appliance_picture_hits",
                "Pictures of requests whose rows were kept.",
                stats.picture_hits_total,
            ),
            (
                "appliance_picture_seconds",
                "Seconds spent encoding pictures.",
                stats.picture_seconds_total,
            ),
            ("appliance_swaps", "Preemptions that kept the blocks.", stats.swaps_total),
            (
                "appliance_requests_failed",
                "Requests that ended with an error or without a reader.",
                self._metrics.failed,
            ),
        ):
            yield counter(name, text, [(self._labels, value)])
        yield histogram(
            "appliance_grammar_compile_seconds",
            "Compiling a grammar in the engine.",
            self._metrics.model_name,
            COMPILE_SECONDS,
            stats.grammar_compiles or [0] * (len(COMPILE_SECONDS) + 1),
            stats.grammar_compile_seconds_total,
        )
        places = enumerate(stats.accepted_tokens_by_place)
        yield counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by their place in the draft, from 0.",
            [({**self._labels, "position": str(place)}, count) for place, count in places],
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
                "appliance_state_checkpoint_events",
                "Recurrent states kept, begun from, evicted, or set back from drafts.",
                "event",
                {
                    "saved": stats.state_saves_total,
                    "restored": stats.state_restores_total,
                    "rewound": stats.state_rewinds_total,
                    "evicted": stats.state_evictions_total,
                },
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

    def _adapters(self) -> Metric:
        """Return the adapters of open requests under vLLM's names; the value is the time."""
        engine = self._engine
        names: dict[bool, set[str]] = {False: set(), True: set()}
        for request, started in engine.open_requests():
            if request.adapter is not None:
                names[started].add(request.adapter.name)
        labels = {
            "max_lora": str(0 if engine.info is None else engine.info.num_adapters),
            "running_lora_adapters": ",".join(sorted(names[True])),
            "waiting_lora_adapters": ",".join(sorted(names[False])),
        }
        text = "Adapters of running and of waiting requests."
        return gauge("vllm:lora_requests_info", text, [(labels, time.time())])

    def _gauges(self) -> Iterator[Metric]:
        stats, engine = self._engine.stats, self._engine
        ready = engine.state is EngineState.READY
        asleep = engine.state.accepts and not ready
        for name, text, value in (
            ("vllm:num_requests_running", "Requests in work.", engine.num_running),
            ("vllm:num_requests_waiting", "Requests in the queue.", engine.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", stats.kv_usage),
            ("appliance_engine_up", "1 while the engine is ready.", float(ready)),
            ("appliance_engine_asleep", "1 while it sleeps or wakes.", float(asleep)),
            ("appliance_engine_wake_seconds", "The latest wake.", engine.wakes.seconds),
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
            ("appliance_queue_limit", "Requests that may wait.", self._max_queue),
        ):
            yield gauge(name, text, [(self._labels, value)])
        yield self._adapters()
        # From the block map, which exists once the engine is ready.
        states: Counter[str] = Counter()
        for replica in engine.replicas:
            if replica.metadata is not None:
                states.update(count_states(replica.metadata))
        host = {
            "swapped": stats.kv_host_swapped,
            "cached": stats.kv_host_blocks - stats.kv_host_swapped,
        }
        slots, cached = stats.state_slots_used, stats.state_checkpoints_cached
        for name, text, counts in (
            (
                "appliance_state_slots",
                "Recurrent states of running sequences.",
                {"used": slots, "free": stats.state_slots - slots},
            ),
            (
                "appliance_state_checkpoints",
                "Recurrent states kept at block boundaries.",
                {"cached": cached, "free": stats.state_checkpoints - cached},
            ),
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
        # Includes zeros, so that no series ends when idle.
        names = self._key_names()
        counts = Counter({(name, state): 0 for name in names for state in ("running", "waiting")})
        for request, started in self._engine.open_requests():
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
        yield gauge(
            "appliance_quality",
            "The quality card of the model: what quantizing its weights cost.",
            [({**self._labels, "fact": one.name}, one.value) for one in self._quality_facts()],
        )
        info = self._engine.info
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
        plan: Counter[str] = Counter()
        for one in filter(None, (replica.info for replica in self._engine.replicas)):
            plan.update(
                weights=one.weight_bytes,
                kv_cache=one.kv_bytes,
                workspace=one.workspace_bytes,
                process=one.process_bytes,
                kv_host=one.kv_host_bytes,
                states=one.state_bytes,
                budget=one.memory_bytes,
            )
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
