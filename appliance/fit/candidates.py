"""Lists the ways to serve a model, with their memory and expected speed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from appliance.engine.encoder.encoder_execution import (
    encoder_execution_on,
    memory_for,
    plan_encoder,
)
from appliance.engine.load.memory_request import request_memory, with_other_cache
from appliance.engine.memory.experts.prediction import token_time
from appliance.engine.memory.experts.split import LayerExperts
from appliance.engine.memory.plan import plan_memory
from appliance.engine.served_model import with_state_format
from appliance.errors import ConfigError, MemoryPlanError
from appliance.fit.expected import expected_rate, launches
from appliance.model.encoder.source import EncoderSource
from appliance.model.narrowed import narrowed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from appliance.config import EngineConfig
    from appliance.engine.memory.experts.prediction import TokenTime
    from appliance.engine.memory.experts.split import ExpertChoice
    from appliance.engine.memory.plan import MemoryPlan, MemoryRequest
    from appliance.fit.place import ModelPlace
    from appliance.model.source import ModelSource

KV_WORDS = ("auto", "bf16", "int8", "int4")
AS_IT_IS = "as it is"
# What `serve` rounds while it loads weights, in the order of loss: bits of the layers, of the ends.
ROUNDED: dict[str, tuple[int | None, int | None]] = {
    "--end-bits 8": (None, 8),
    "--end-bits 4": (None, 4),
    "--weight-bits 8": (8, None),
    "--weight-bits 4": (4, None),
}
# Bits per weight from `appliance quantize`: codes, and scales of groups of 128.
_QUANTIZED = {"int8": 8 + 16 / 128, "int4": 4 + 16 / 128}
# By what a model loses: 8 bits are the same in both, 4 bits of `quantize` are closer.
_BY_LOSS = (
    AS_IT_IS, "--end-bits 8", "--weight-bits 8", "int8", "--end-bits 4", "int4", "--weight-bits 4",
)  # fmt: skip
_COMFORT = 10.0  # tokens/s of one stream, faster than most people read


@dataclass(frozen=True, slots=True)
class FitRow:
    """One way to serve a model.

    Attributes:
        weights: "as it is", a setting that rounds them, or a form that `quantize` can make.
        kv: precision of the KV cache, as `--kv-cache-dtype` takes it.
        kv_format: its format on this device.
        states: what recurrent states are kept in; "fp16" where float32 would not fit.
        streams: whole contexts that fit at once.
        plan: of memory; None if it does not fit.
        refusal: why it does not fit, with the nearest that does.
        rate: upper bound of one stream's tokens/s, see `token_time`; None without a bandwidth.
        expected: tokens/s that are expected on a GPU, see `expected_rate`; never measured.
        kernels: of a step, by which that was computed.
    """

    weights: str
    kv: str
    kv_format: str
    context_length: int
    streams: int
    plan: MemoryPlan | None
    states: str = "fp32"
    refusal: str = ""
    rate: float | None = None
    expected: float | None = None
    kernels: int = 0

    @property
    def experts_on_cpu(self) -> int:
        return 0 if self.plan is None else len(self.plan.host_experts.layers)

    @property
    def total_bytes(self) -> int:
        """Planned bytes without experts in host memory; 0 if it does not fit."""
        if self.plan is None:
            return 0
        plan = self.plan
        cached = plan.kv_bytes + plan.states.num_bytes
        beside = plan.workspace_bytes + plan.picture_bytes + plan.draft_bytes
        return plan.process_bytes + plan.weight_bytes + cached + beside


def candidates(
    source: EncoderSource | ModelSource,
    config: EngineConfig,
    place: ModelPlace,
    *,
    context_length: int | None = None,
    streams: int = 1,
) -> list[FitRow]:
    """List the ways to serve a model, best first.

    First come those that fit; among them those fast enough to read along, then those with no
    experts in host memory, then those that change the model least, then the faster.

    Args:
        config: settings; KV precision, context and sizes are varied.
        context_length: tokens; None tries the model's own, and shorter ones if that is too long.
        streams: whole contexts to hold at once.

    Raises:
        ConfigError: the context is longer than the model's.
    """
    most = source.spec.context_length
    if context_length is not None and context_length > most:
        raise ConfigError(f"this model was made for {most:,} tokens; ask for that or less")
    wanted = context_length or most
    config = msgspec.structs.replace(config, max_num_seqs=max(config.max_num_seqs, streams))
    if source.only_reads:
        found = list(_of_reader(source, config, place, wanted, streams))
    else:
        assert not isinstance(source, EncoderSource)
        source = with_state_format(source, config)
        found = _of_decoder(source, config, place, wanted, streams)
    return sorted(found, key=_rank)


def _of_reader(
    source: EncoderSource | ModelSource,
    config: EngineConfig,
    place: ModelPlace,
    wanted: int,
    streams: int,
) -> Iterator[FitRow]:
    """List the ways to serve a model that only reads, which needs no cache."""
    whole = {name: bits for name, (bits, _) in ROUNDED.items() if bits is not None}
    for weights, bits in {AS_IT_IS: None, **whole}.items():
        rounded = msgspec.structs.replace(config, weight_bits=bits)
        try:
            execution = encoder_execution_on(rounded, source, place.gpu_bytes)
        except ConfigError:
            if bits is None:
                raise
            continue  # the weights have no more bits, or torch runs it
        budget = memory_for(rounded, execution.device, place.gpu_bytes)
        refusal = ""
        for context in _contexts(wanted):
            asked = msgspec.structs.replace(rounded, max_model_len=context)
            try:
                plan = plan_encoder(asked, source, execution, *budget)
            except MemoryPlanError as error:
                refusal = refusal or str(error)
                continue
            yield FitRow(weights, "auto", "none", context, streams, plan, refusal=refusal)
            break
        else:
            yield FitRow(weights, "auto", "none", wanted, streams, None, refusal=refusal)


def _of_decoder(
    source: ModelSource, config: EngineConfig, place: ModelPlace, wanted: int, streams: int
) -> list[FitRow]:
    forms = {name: narrowed(source, *bits) for name, bits in ROUNDED.items()}
    if any(forms[name] for name, (bits, _) in ROUNDED.items() if bits is not None):
        forms = {name: one for name, one in forms.items() if ROUNDED[name][0] is not None}
    saved = {name: _saved_bytes(source, bits) for name, bits in _QUANTIZED.items()}
    measured: dict[str, MemoryRequest] = {}  # by weights, with the first cache
    found: list[FitRow] = []
    for kv in KV_WORDS:
        chosen = msgspec.structs.replace(config, kv_cache_dtype=kv)
        try:
            if not measured or measured[AS_IT_IS].draft_bytes:
                measured = _measured(chosen, source, forms, place)
            sized = {
                weights: with_other_cache(one, chosen, source, place.gpu_bytes)
                for weights, one in measured.items()
            }
        except ConfigError:
            continue  # not on this device
        request = sized[AS_IT_IS]
        if kv != "auto" and any(one.kv_format == request.kv_format for one in found):
            continue
        for weights, bits in _QUANTIZED.items():
            less = saved[weights]
            if less is not None:
                left, experts = request.weight_bytes - less, _quantized(request.experts, bits)
                sized[weights] = replace(request, weight_bytes=left, experts=experts)
        for weights, one in sized.items():
            stored = forms.get(weights) or source
            found += _candidate(stored, one, place, weights, kv, wanted, streams)
    return found


def _measured(
    config: EngineConfig,
    source: ModelSource,
    forms: dict[str, ModelSource | None],
    place: ModelPlace,
) -> dict[str, MemoryRequest]:
    """Measure the weights as they are, and in the forms that `serve` rounds them to."""
    _, request = request_memory(config, source, place.gpu_bytes)
    found = {AS_IT_IS: request}
    for weights, form in forms.items():
        if form is not None:
            bits, ends = ROUNDED[weights]
            rounded = msgspec.structs.replace(config, weight_bits=bits, end_bits=ends)
            _, found[weights] = request_memory(rounded, form, place.gpu_bytes)
    return found


def _candidate(
    source: ModelSource,
    request: MemoryRequest,
    place: ModelPlace,
    weights: str,
    kv: str,
    wanted: int,
    streams: int,
) -> Iterator[FitRow]:
    """Yield a way to serve; and one with states in 16 bits if that holds a longer context."""
    row = _with_context(source, request, place, weights, kv, wanted, streams)
    yield row
    narrow = request.narrow_state_bytes
    if not narrow or (row.plan is not None and row.context_length == wanted):
        return
    narrower = replace(request, state_bytes=narrow, narrow_state_bytes=0)
    other = _with_context(source, narrower, place, weights, kv, wanted, streams)
    if other.plan is not None and (row.plan is None or other.context_length > row.context_length):
        yield replace(other, states="fp16")


def _with_context(
    source: ModelSource,
    request: MemoryRequest,
    place: ModelPlace,
    weights: str,
    kv: str,
    wanted: int,
    streams: int,
) -> FitRow:
    refusal = ""
    kept = source.spec.state_format.value
    for context in _contexts(wanted):
        blocks = -(-context // request.block_size) * streams
        asked = replace(
            request,
            max_model_len=context,
            kv_cache_memory=blocks * request.block_size * request.kv_bytes_per_token,
        )
        try:
            plan = plan_memory(asked)
        except MemoryPlanError as error:
            refusal = refusal or str(error)
            continue
        time = _time(source, plan, asked, place, context, _QUANTIZED.get(weights))
        expected = None
        if time is not None and place.is_gpu and place.count == 1:
            expected = expected_rate(time, source.spec)
        return FitRow(
            weights,
            kv,
            request.kv_format,
            context,
            streams,
            plan,
            refusal=refusal,
            rate=None if time is None else time.per_second,
            expected=expected,
            kernels=launches(source.spec),
            states=kept,
        )
    return FitRow(
        weights, kv, request.kv_format, wanted, streams, None, states=kept, refusal=refusal
    )


def _contexts(wanted: int) -> Iterator[int]:
    """Yield the wanted context, then powers of two below it."""
    yield wanted
    power = 2 ** math.ceil(math.log2(wanted) - 1)
    while power >= min(wanted, 2048):
        if power < wanted:
            yield power
        power //= 2


def _saved_bytes(source: ModelSource, bits: float) -> int | None:
    """Return the bytes that quantizing a 16-bit model saves; None if it is already packed."""
    saved = 0.0
    for slot in source.slots():
        if not slot.is_linear:
            continue
        if source.weights.packed_bits(slot.name) or source.weights.float_bits(slot.name):
            return None
        saved += math.prod(slot.shape) * (2 - bits / 8)
    return int(saved)


def _time(
    source: ModelSource,
    plan: MemoryPlan,
    request: MemoryRequest,
    place: ModelPlace,
    context: int,
    linear_bits: float | None,
) -> TokenTime | None:
    """Return the least time of a token of one stream, at half of its context."""
    if place.bandwidth is None:
        return None
    # Each step reads the keys and values, and reads and writes the states.
    kept = request.kv_bytes_per_token * context / 2 + 2 * request.state_bytes
    on_host = plan.host_experts
    return token_time(source, plan.weight_bytes, kept, on_host, place.bandwidth, linear_bits)


def _quantized(choice: ExpertChoice | None, bits: float) -> ExpertChoice | None:
    """Scale the sizes of experts from 16 bits to `bits`."""
    if choice is None:
        return None
    share = bits / 16
    layers = (
        LayerExperts(one.layer, int(one.device_bytes * share), math.ceil(one.host_bytes * share))
        for one in choice.layers
    )
    return replace(choice, layers=tuple(layers))


def _rank(one: FitRow) -> tuple[float, ...]:
    is_slow = one.rate is not None and one.rate < _COMFORT
    return (
        one.plan is None,
        is_slow,
        -one.context_length,
        one.experts_on_cpu > 0,
        _BY_LOSS.index(one.weights),
        KV_WORDS.index(one.kv),
        one.states != "fp32",
    )
