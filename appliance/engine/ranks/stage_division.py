"""A model divided into runs of whole layers, by the bytes of their weights, caches and states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.engine.ranks.messages import Room
from appliance.engine.ranks.pipeline import PipelineWork
from appliance.engine.ranks.shares import LEAST_GAIN
from appliance.kernels.cpu.cache import bytes_per_token
from appliance.model.shard.stage import Stage, check_stages, cut_layers, run_bytes
from appliance.model.size import native_slot_bytes
from appliance.model.tensors import Role

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Sequence

    from appliance.config import EngineConfig
    from appliance.engine.devices import Precision
    from appliance.engine.ranks.shared_step import SharedStep
    from appliance.engine.ranks.work import RankWork
    from appliance.kernels.cpu.cache import NativeCache
    from appliance.kernels.cpu.group import NativeGroup
    from appliance.model.native import NativeDecoder
    from appliance.model.shard.split import Split
    from appliance.model.source import ModelSource
    from appliance.model.spec import DecoderSpec
    from appliance.model.tensors import TensorSlot


@dataclass(frozen=True, slots=True)
class Stages:
    """Each rank has a run of whole layers; see `Division`.

    Attributes:
        stage_bytes: of each rank, with the keys and values of one whole context.
    """

    split: Split
    parts: tuple[Stage, ...]
    stage_bytes: tuple[float, ...]

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        source: ModelSource,
        split: Split,
        precision: Precision,
        library: ctypes.CDLL,
        rates: Sequence[float] = (),
    ) -> Stages:
        """Divide a model.

        Args:
            rates: bytes per second of each rank, to divide by if the slowest one gains enough;
                otherwise bytes are divided by the shares.

        Raises:
            ConfigError: it has too few layers, or layers that need other layers' inputs.
        """
        spec = source.spec
        check_stages(spec, split.size)
        sizes, first, last = _layer_bytes(config, source, precision, library)
        bounds = cut_layers(sizes, split.shares, first, last)
        if rates:

            def slowest(bounds: tuple[int, ...]) -> float:
                runs = run_bytes(sizes, bounds, first, last)
                return max(run / rate for run, rate in zip(runs, rates, strict=True))

            by_rate = cut_layers(sizes, rates, first, last)
            if slowest(by_rate) < (1 - LEAST_GAIN) * slowest(bounds):
                bounds = by_rate
        stages = tuple(Stage.of(spec, bounds, rank) for rank in range(split.size))
        return cls(split, stages, run_bytes(sizes, bounds, first, last))

    @property
    def bounds(self) -> tuple[int, ...]:
        return self.parts[0].bounds

    def in_words(self) -> str:
        return f"{self.split.size} stages from layers {', '.join(map(str, self.bounds[:-1]))}"

    def notes(self) -> tuple[str, ...]:
        runs = [
            f"{_run_in_words(*stage.layers)} ({num_bytes / 2**20:,.1f} MiB)"
            for stage, num_bytes in zip(self.parts, self.stage_bytes, strict=True)
        ]
        return (
            f"{self.split.size} processes run the model's layers in turn, with their keys and"
            f" values of one context: {', '.join(runs)}",
        )

    def copies(self, slot: TensorSlot) -> float:
        is_tied = self.parts[0].whole.tied_head and slot.role is Role.EMBEDDING
        return 2 if is_tied else 1

    def cached(self, spec: DecoderSpec) -> tuple[DecoderSpec, ...]:
        return (spec,)

    def room(self, config: EngineConfig, payload_bytes: int) -> Room:
        """An exchange holds all rows of the largest step, and the last rank's results."""
        rows, spec = config.max_num_batched_tokens, self.parts[0].whole
        answers = 4 * rows * max(spec.hidden_size, spec.vocab_size)
        return Room(rows * spec.hidden_size, payload_bytes, answers)

    def work(
        self, rank: int, own: NativeDecoder, group: NativeGroup, at: SharedStep
    ) -> RankWork[NativeCache]:
        return PipelineWork(own, self.parts[rank], group, at)


def _layer_bytes(
    config: EngineConfig, source: ModelSource, precision: Precision, library: ctypes.CDLL
) -> tuple[list[float], float, float]:
    """Return the bytes of each layer, and the extra bytes of the first and the last rank.

    A layer holds its weights, the keys and values of one whole context, and all sequences'
    states.
    """
    spec, dtype = source.spec, precision.dtype
    sizes, first, last = [0.0] * len(spec.layers), 0.0, 0.0
    for slot in source.slots():
        num_bytes = native_slot_bytes(source, slot, dtype)
        if slot.layer is not None:
            sizes[slot.layer] += num_bytes
        elif slot.role in (Role.HEAD, Role.NORM):
            last += num_bytes
        else:
            first += num_bytes
            last += num_bytes * (spec.tied_head and slot.role is Role.EMBEDDING)
    tokens = config.max_model_len or spec.context_length
    layers = precision.kv_layers
    for (index, mixer), layer in zip(spec.cache_layers.items(), layers, strict=True):
        heads = mixer.num_kv_heads, mixer.head_dim
        sizes[index] += tokens * bytes_per_token(library, layer.format, *heads)
    for index in spec.recurrent_layers:
        own = Stage.of(spec, (index, index + 1), 0).spec
        sizes[index] += config.max_num_seqs * own.state_bytes
    return sizes, first, last


def _run_in_words(first: int, last: int) -> str:
    return f"layer {first}" if last == first + 1 else f"layers {first} to {last - 1}"
