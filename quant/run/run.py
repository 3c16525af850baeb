"""One run of `appliance quantize`: its opened and planned model, its journal and its report."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from appliance.errors import ChangedRunError
from appliance.files import replace_atomically
from appliance.gguf import GGUFFile
from appliance.quant.run.fingerprint import differences
from appliance.quant.run.memory import MemoryUse
from appliance.quant.run.plan import growth_note

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import torch

    from appliance.model.source import ModelSource
    from appliance.quant.gguf.file_writer import PlannedFile
    from appliance.quant.gguf.projector import Projector
    from appliance.quant.kv.calibrate import KVPlan
    from appliance.quant.run.fingerprint import Fingerprint
    from appliance.quant.run.options import QuantizeOptions
    from appliance.quant.run.plan import QuantizePlan
    from appliance.quant.text.calibration import Calibration

_FILE = "journal.json"
SHOWN_NOTES = 3


@dataclass(frozen=True, slots=True)
class QuantizeRun:
    model_path: Path
    options: QuantizeOptions
    source: ModelSource
    plan: QuantizePlan
    device: torch.device
    started: float  # by time.monotonic
    file: PlannedFile | None = None  # of a run that writes GGUF
    projector: Projector | None = None  # beside that file
    kv: KVPlan | None = None  # plan of the KV cache, once chosen
    chosen: tuple[str, ...] = ()  # notes on what was chosen for the user


@dataclass(frozen=True, slots=True)
class QuantizeReport:
    """Sizes of the result, and differences from the request.

    Attributes:
        num_quantized: quantized linear weights.
        quantized_parameters: numbers in them.
        quantized_bytes: of their codes, scales and zero points.
        seconds: from opening the model to the finished folder, over all runs.
        losses: of each quantized linear's outputs, as a share of their energy; empty for rounding.
        peak_ram: peak bytes of memory over all runs.
        peak_vram: peak bytes of torch on the GPU.
        calibration: the calibration text, in words; "" without.
        calibration_fingerprint: changes with every token of it.
        card_tokens: to measure its quality card on; 0 for no card.
    """

    out: Path
    architecture: str
    method: str
    scheme: str
    num_quantized: int
    quantized_parameters: int
    quantized_bytes: int
    parameters: int
    weight_bytes: int
    seconds: float
    notes: tuple[str, ...]
    losses: dict[str, float] = field(default_factory=dict)
    peak_ram: int = 0
    peak_vram: int = 0
    calibration: str = ""
    calibration_fingerprint: str = ""
    card_tokens: int = 0

    @property
    def quantized_bits_per_weight(self) -> float:
        """Bits per quantized weight, scales and zero points included."""
        return self.quantized_bytes * 8 / self.quantized_parameters

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight of the whole model, embeddings and head included."""
        return self.weight_bytes * 8 / self.parameters

    def summary(self) -> str:
        lines = [
            f"quantized {self.num_quantized} weights of a {self.architecture} model"
            f" ({self.method}, {self.scheme}) in {self.seconds:.1f} s,"
            f" at most {self.peak_ram / 2**20:,.0f} MiB of memory"
            + (f" and {self.peak_vram / 2**20:,.0f} MiB on the GPU" * (self.peak_vram > 0)),
            f"{self.out}: {self.weight_bytes / 2**20:,.1f} MiB,"
            f" {self.quantized_bits_per_weight:.2f} bits per quantized weight,"
            f" {self.bits_per_weight:.2f} per weight of the whole model",
        ]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A finished unit: a layer, or a tensor outside the layers."""

    unit: str
    seconds: float
    losses: dict[str, float] = {}  # of each quantized linear, as a share of its outputs' energy
    notes: tuple[str, ...] = ()  # for the user
    facts: dict[str, Any] = {}  # data for the end of the run, as JSON


class _Contents(msgspec.Struct, frozen=True, kw_only=True):
    fingerprint: dict[str, str]
    records: tuple[Record, ...] = ()
    is_complete: bool = False
    peak_ram: int = 0
    peak_vram: int = 0


class Journal:
    """The record of a run.

    Args:
        folder: may hold the journal of an earlier run.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _FILE
        try:
            self._contents = msgspec.json.decode(self._path.read_bytes(), type=_Contents)
        except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError):
            # The file is written atomically: if it does not decode, it is from another version.
            self._contents = _Contents(fingerprint={})

    @property
    def records(self) -> tuple[Record, ...]:
        """Records of all finished units, in the order they finished."""
        return self._contents.records

    @property
    def is_complete(self) -> bool:
        """True once the result only has to be renamed."""
        return self._contents.is_complete

    @property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the recorded run; empty if there is none."""
        return self._contents.fingerprint

    @property
    def peaks(self) -> tuple[int, int]:
        """Peak bytes of memory and of GPU memory over the run."""
        return self._contents.peak_ram, self._contents.peak_vram

    def check(self, fingerprint: Fingerprint, staging: Path) -> None:
        """Raise ChangedRunError, with the differences, if another run left this journal."""
        changed = differences(self._contents.fingerprint, fingerprint)
        if changed:
            raise ChangedRunError(
                f"{staging} holds {len(self.records)} finished parts of another run:"
                f" {'; '.join(changed)}; run that one again, or add --restart to discard them"
            )

    def start(self, fingerprint: Fingerprint) -> None:
        """Start a run with no finished units."""
        self._write(_Contents(fingerprint=fingerprint))

    def commit(self, record: Record, peak_ram: int = 0, peak_vram: int = 0) -> None:
        """Record a finished unit, whose output must be on disk."""
        ram, vram = self.peaks
        self._write(
            msgspec.structs.replace(
                self._contents,
                records=(*self.records, record),
                peak_ram=max(ram, peak_ram),
                peak_vram=max(vram, peak_vram),
            )
        )

    def complete(self) -> None:
        self._write(msgspec.structs.replace(self._contents, is_complete=True))

    def _write(self, contents: _Contents) -> None:
        with replace_atomically(self._path) as temporary:
            temporary.write_bytes(msgspec.json.encode(contents))
        self._contents = contents


def report_of(
    run: QuantizeRun, out: Path, journal: Journal, calibration: Calibration | None
) -> QuantizeReport:
    """Report a finished run; `out` is the model, a folder or a file."""
    plan, options = run.plan, run.options
    quantized = [tensor for tensor in plan.tensors if tensor.scheme is not None]
    use = MemoryUse.now(run.device)
    peak_ram, peak_vram = journal.peaks
    return QuantizeReport(
        out=out,
        architecture=run.source.spec.architecture,
        method=options.method.value,
        scheme=options.form,
        num_quantized=len(quantized),
        quantized_parameters=sum(math.prod(tensor.shape) for tensor in quantized),
        quantized_bytes=sum(tensor.nbytes for tensor in quantized),
        parameters=sum(math.prod(tensor.shape) for tensor in plan.tensors),
        weight_bytes=sum(tensor.nbytes for tensor in plan.tensors),
        seconds=max(
            time.monotonic() - run.started, sum(record.seconds for record in journal.records)
        ),
        losses={name: loss for record in journal.records for name, loss in record.losses.items()},
        peak_ram=max(use.peak_ram, peak_ram, 0 if calibration is None else calibration.peak_ram),
        peak_vram=max(use.peak_vram, peak_vram),
        notes=(
            *([] if run.kv is None else [str(run.kv)]),
            *_notes(run, calibration),
            *_first_of(note for record in journal.records for note in record.notes),
            *plan.notes,
        ),
        calibration="" if calibration is None else str(calibration),
        calibration_fingerprint="" if calibration is None else calibration.fingerprint,
        card_tokens=options.card_tokens,
    )


def _first_of(notes: Iterable[str]) -> Iterator[str]:
    """Yield the first notes of layers and the number of the others, which only events have."""
    every = list(notes)
    yield from every[:SHOWN_NOTES]
    if len(every) > SHOWN_NOTES:
        yield f"{len(every) - SHOWN_NOTES} more weights are like these"


def _notes(run: QuantizeRun, calibration: Calibration | None) -> Iterator[str]:
    yield from run.chosen
    yield from run.source.notes
    if calibration is not None:
        yield str(calibration)
    if run.model_path.is_file():
        file = GGUFFile(run.model_path)
        types = {file.type_name(n) for n in file.tensor_names() if len(file.shape(n)) == 2}
        lossy = sorted(types - {"F32", "F16", "BF16"})
        if lossy:
            yield (
                f"re-quantized from {', '.join(lossy)}, so the losses of both add up;"
                " the 16-bit model it was made from gives a better result"
            )
    growth = growth_note(run.source, run.plan)
    if growth is not None:
        yield growth
    if run.file is not None and run.options.method.scales_inputs:
        yield "inputs are scaled, so adapters that were made for the model itself do not fit"
