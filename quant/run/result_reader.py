"""Chooses method and form by the program that reads the result, or by haste."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from appliance.errors import ConfigError
from appliance.quant.formats.scheme import TrellisScheme
from appliance.quant.run.options import Asked, Method, ResultReader, WeightFormat, read_asked

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.quant.run.options import QuantizeOptions

# Types that names of GGUF files end with.
_TYPE_IN_NAME = re.compile(r"[-._](?:I?Q\d\w*|BF16|F16|F32)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Words:
    """A command's words about method and form; None where it says nothing.

    Attributes:
        fast: round instead of reading text.
        text: options that were given and read text, by name.
    """

    reader: ResultReader | None = None
    fast: bool = False
    method: Method | None = None
    bits: int | None = None
    group_size: str | None = None
    symmetric: bool | None = None
    format: WeightFormat | None = None
    file_type: str | None = None
    text: tuple[str, ...] = ()

    def read(self) -> tuple[Asked, WeightFormat]:
        """Return what is asked for, and the format.

        Raises:
            ConfigError: two of the words contradict each other.
        """
        format = self._format()
        self._check(format)
        if format is WeightFormat.TRELLIS and self.method is None:
            if self.group_size is not None or self.symmetric is not None:
                given = "--group-size" if self.group_size is not None else "--symmetric"
                raise ConfigError(f"--format trellis has a scale per output; leave {given} out")
            scheme = TrellisScheme(4 if self.bits is None else self.bits)
            return Asked(Method.OPEN, scheme, frozenset({"format"} - self._said())), format
        asked = read_asked(
            self.method,
            self.bits,
            self.group_size,
            symmetric=self.symmetric,
            format=format,
            file_type=self.file_type,
        )
        if self.fast and asked.method is Method.OPEN:
            asked = replace(asked, open=asked.open | {"text"})
        return asked, format

    def _said(self) -> set[str]:
        return set() if self.format is None else {"format"}

    def _format(self) -> WeightFormat:
        if self.format is not None:
            return self.format
        if self.file_type is not None or self.reader is ResultReader.LLAMA_CPP:
            return WeightFormat.GGUF
        if self.method is Method.TRELLIS:
            return WeightFormat.TRELLIS
        others = (self.method, self.group_size, self.symmetric)
        is_plain = not self.fast and self.bits != 8 and all(word is None for word in others)
        if self.reader is ResultReader.APPLIANCE and is_plain:
            return WeightFormat.TRELLIS
        return WeightFormat.COMPRESSED_TENSORS

    def _check(self, format: WeightFormat) -> None:
        """Raise ConfigError if the words contradict each other."""
        if self.fast:
            if self.method is not None:
                raise ConfigError(f"--fast rounds; leave it or --method {self.method.value} out")
            if format is WeightFormat.TRELLIS:
                raise ConfigError("--fast reads no text, and --format trellis needs it")
            if self.text:
                raise ConfigError(f"--fast reads no text; leave it or {self.text[0]} out")
        if self.reader is not None and format not in self.reader.formats:
            given = f"--format {format.value}"
            if self.format is None:
                given = f"--type {self.file_type}" if self.file_type else "--method trellis"
            raise ConfigError(f"{self.reader.value} does not read {given}; leave it or --for out")


def usual_out(name: str, folder: Path, options: QuantizeOptions) -> Path:
    """Name a result after its model and its bits, or its type of GGUF.

    Args:
        name: of the model, or its id at a hub.
        folder: that the result is put into.
    """
    stem = _TYPE_IN_NAME.sub("", name.rstrip("/").rpartition("/")[2])
    bits = options.scheme.bits if options.mixed is None else options.mixed
    return folder / f"{stem}-{options.file_type or f'{bits:g}bit'}"
