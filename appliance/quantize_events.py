"""What a run of `appliance quantize` tells while it goes on: to a display, script or dashboard.

With `--json` each event is one line of JSON on standard output, and its field `event` says which:

    step      something that takes a while begins, before there is a plan
    start     once, before any weight is quantized
    plan      what will be done, and what memory, disk and time that takes; measured beforehand
    unit      a layer, or a tensor that is in none, is done and on the disk
    written   all tensors are
    done      the result has its name; what follows changes nothing of it
    measure   how far the measuring of its quality has come
    card      its quality was measured; the last event, unless no card was wanted or possible
    error     the last event of a run that did not come to its end

The same lines are in `events.jsonl` in the state folder of an unfinished run,
`.OUT.partial/state`; the last one may be cut where the process was killed. A leaf: imports neither
torch nor anything of ours.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class Start(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="start"):
    """A run begins, or goes on."""

    model: str
    out: str
    architecture: str
    method: str
    scheme: str
    units: int  # layers, and tensors that are in none
    units_done: int  # by an earlier run
    weight_bytes: int  # of the result
    max_ram: int | None = None  # bytes
    max_vram: int | None = None


class Step(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="step"):
    """Something begins that takes a while."""

    what: str  # such as "choosing the precision of the KV cache"


class TensorClass(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors of one kind and what becomes of them."""

    tensors: str  # such as "layer weights"
    count: int
    form: str  # such as "4 bits, groups of 64, symmetric"
    nbytes: int  # of the result


class Plan(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="plan"):
    """What the run takes."""

    peak_ram: int  # bytes; of the whole process
    peak_vram: int
    disk_bytes: int  # beside the result's own, until the end
    seconds: float  # of all that is still to do
    measured: bool  # whether the largest layer was tried, or all of this is reckoned
    classes: tuple[TensorClass, ...]
    notes: tuple[str, ...] = ()  # what a person should know before it begins


class Unit(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="unit"):
    """A part of the model is done."""

    name: str  # such as "layer 3"
    done: int  # units
    total: int
    seconds: float
    losses: dict[str, float]  # by weight, as a share of its outputs' energy; none by rounding
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
    """The result is there."""

    out: str
    seconds: float  # of all runs it took
    weight_bytes: int
    bits_per_weight: float
    peak_ram: int
    peak_vram: int
    notes: tuple[str, ...]


class Measuring(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="measure"):
    """The quality card is being made."""

    stage: str  # such as "evaluating layers"
    done: int
    total: int


class CardWritten(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="card"):
    """What the result is worth is known, and beside it as a quality card."""

    path: str  # of the JSON
    kld_mean: float  # nats per token, from the model that was quantized
    same_top_percent: float  # of places where both think the same token the likeliest


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="error"):
    """The run ended before its end."""

    message: str
    units_done: int  # kept for the next run; 0 means that it begins anew


QuantizeEvent = Step | Start | Plan | Unit | Written | Done | Measuring | CardWritten | Failed
OnEvent = Callable[[QuantizeEvent], None]


def encode_event(event: QuantizeEvent) -> bytes:
    """One line of JSON, without its end."""
    return msgspec.json.encode(event)


def decode_event(line: bytes | str) -> QuantizeEvent:
    """The event of one line.

    Raises:
        msgspec.MsgspecError: it is no event, or cut.
    """
    event: QuantizeEvent = msgspec.json.decode(line, type=QuantizeEvent)
    return event


def ignore_event(event: QuantizeEvent) -> None:
    """Tell nobody."""
