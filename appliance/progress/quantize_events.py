"""Events of a run of `appliance quantize`, for a display, script or dashboard.

With `--json` each event is one line of JSON on standard output; its field `event` is one of:

    step      a longer piece of work begins, before there is a plan
    estimate  the time that the run will take, counted beforehand
    start     once, before any weight is quantized
    plan      the work, and the memory, disk space and time it takes; measured beforehand
    unit      a layer, or a tensor outside the layers, is is on disk
    written   all tensors are on disk
    done      the result has its name; later events do not change it
    measure   progress of measuring its quality
    card      its quality was measured; the last event, if a card was requested and possible
    error     the last event of a run that failed

The same lines are in `events.jsonl` in the state folder of an unfinished run, `.OUT.partial/state`;
the last one may be cut where the process was killed. A leaf: imports neither torch nor anything of
ours.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class Start(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="start"):
    """A run starts or resumes."""

    model: str
    out: str
    architecture: str
    method: str
    scheme: str
    units: int  # layers, and tensors outside the layers
    units_done: int  # by earlier runs
    weight_bytes: int  # of the result
    max_ram: int | None = None  # bytes
    max_vram: int | None = None


class StepStarted(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="step"):
    what: str  # such as "choosing the precision of the KV cache"


class RunEstimated(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="estimate"):
    """Expected seconds of a run's parts."""

    method: str
    form: str  # of the weights, in words
    writing: float  # of the calibration text by the model
    weights: float
    card: float
    cores: int  # threads that work

    @property
    def seconds(self) -> float:
        return self.writing + self.weights + self.card


class TensorClass(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors of one kind and their new form."""

    tensors: str  # such as "layer weights"
    count: int
    form: str  # such as "4 bits, groups of 64, symmetric"
    nbytes: int  # of the result


class RunPlanned(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="plan"):
    """Resources of the run."""

    peak_ram: int  # bytes; of the whole process
    peak_vram: int
    disk_bytes: int  # beside the result, during the run
    seconds: float  # for the remaining work
    measured: bool  # by running the largest layer; False if all of this is computed
    classes: tuple[TensorClass, ...]
    notes: tuple[str, ...] = ()  # warnings before the run begins


class UnitFinished(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="unit"):
    """A part of the model is finished."""

    name: str  # such as "layer 3"
    done: int  # units
    total: int
    seconds: float
    losses: dict[str, float]  # per weight, as a share of its outputs' energy; empty when rounding
    notes: tuple[str, ...] = ()
    bytes_done: int
    bytes_total: int
    remaining_seconds: float
    ram: int  # bytes now
    peak_ram: int
    vram: int
    peak_vram: int


class Written(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="written"):
    """All tensors are in their files."""

    weight_bytes: int


class Done(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="done"):
    """The result is complete."""

    out: str
    seconds: float  # of all runs
    weight_bytes: int
    bits_per_weight: float
    peak_ram: int
    peak_vram: int
    notes: tuple[str, ...]


class Measuring(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="measure"):
    """Progress of the quality card."""

    stage: str  # such as "evaluating layers"
    done: int
    total: int


class CardWritten(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="card"):
    """The result was measured and has its quality card."""

    path: str  # of the JSON
    kld_mean: float  # nats per token, from the model that was quantized
    same_top_percent: float  # share of positions where both rank the same token first


class RunFailed(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="error"):
    """The run stopped with an error."""

    message: str
    units_done: int  # kept for the next run; 0 means that it starts over


QuantizeEvent = (
    StepStarted
    | RunEstimated
    | Start
    | RunPlanned
    | UnitFinished
    | Written
    | Done
    | Measuring
    | CardWritten
    | RunFailed
)
OnEvent = Callable[[QuantizeEvent], None]


def encode_event(event: QuantizeEvent) -> bytes:
    return msgspec.json.encode(event)


def decode_event(line: bytes | str) -> QuantizeEvent:
    """Decode one line; raise msgspec.MsgspecError if it is invalid or incomplete."""
    event: QuantizeEvent = msgspec.json.decode(line, type=QuantizeEvent)
    return event


def ignore_event(event: QuantizeEvent) -> None: ...
