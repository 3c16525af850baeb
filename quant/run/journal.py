"""What a run has finished so far, kept so that a later one goes on from there.

A unit of work counts as done when its record is in the journal, and it is recorded only when all
that it wrote is on the disk. The journal is replaced whole, never changed in place.
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
    """One unit of work: a layer, or a tensor that is in none."""

    unit: str
    seconds: float
    losses: dict[str, float] = {}  # of each quantized linear, as a share of its outputs' energy
    notes: tuple[str, ...] = ()  # what a person should know of it
    facts: dict[str, Any] = {}  # what the end of the run needs to know of it; JSON


class _Contents(msgspec.Struct, frozen=True, kw_only=True):
    fingerprint: dict[str, str]
    records: tuple[Record, ...] = ()
    is_complete: bool = False
    peak_ram: int = 0
    peak_vram: int = 0


class Journal:
    """The record of a run in a folder.

    Args:
        folder: exists; holds the journal of an earlier run, or none.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _FILE
        try:
            self._contents = msgspec.json.decode(self._path.read_bytes(), type=_Contents)
        except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError):
            # Written whole or not at all, so what does not decode is another version's.
            self._contents = _Contents(fingerprint={})

    @property
    def records(self) -> tuple[Record, ...]:
        """Of all units that are done, in the order in which they were."""
        return self._contents.records

    @property
    def is_complete(self) -> bool:
        """Whether all is done but giving the result its name."""
        return self._contents.is_complete

    @property
    def fingerprint(self) -> Fingerprint:
        """Of the run that was begun; empty if none was."""
        return self._contents.fingerprint

    @property
    def peaks(self) -> tuple[int, int]:
        """Most bytes of memory and of GPU memory that any part of the run has used."""
        return self._contents.peak_ram, self._contents.peak_vram

    def check(self, fingerprint: Fingerprint, staging: Path) -> None:
        """Refuse to go on with what another run began.

        Raises:
            ChangedRunError: it differs; the message says in what.
        """
        changed = differences(self._contents.fingerprint, fingerprint)
        if changed:
            raise ChangedRunError(
                f"{staging} holds {len(self.records)} finished parts of another run:"
                f" {'; '.join(changed)}; run that one again, or add --restart to discard them"
            )

    def start(self, fingerprint: Fingerprint) -> None:
        """Begin a run of which nothing is done."""
        self._write(_Contents(fingerprint=fingerprint))

    def commit(self, record: Record, peak_ram: int = 0, peak_vram: int = 0) -> None:
        """Count a unit as done; all that it wrote is on the disk."""
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
        """Note that the result is whole."""
        self._write(msgspec.structs.replace(self._contents, is_complete=True))

    def _write(self, contents: _Contents) -> None:
        with replace_atomically(self._path) as temporary:
            temporary.write_bytes(msgspec.json.encode(contents))
        self._contents = contents
