"""Records the finished parts of a run, so that a later run continues from there.

A unit is recorded once everything it wrote is on disk. The journal is replaced as a whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from appliance.errors import ChangedRunError
from appliance.files import replace_atomically
from appliance.quant.run.fingerprint import differences

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.quant.run.fingerprint import Fingerprint

_FILE = "journal.json"


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
