"""The report of a finished quantization. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


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
