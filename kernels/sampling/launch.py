"""Launches sampling on the GPU without waiting: workspace, checks and grids."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.errors import UnsupportedModelError
from appliance.kernels.gpu.direct_launch import Launcher, device_of
from appliance.kernels.sampling import kernel as kernels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from appliance.kernels.sampling.rows import SamplingRows

CHUNK = 4096  # logits of one program: 32 programs share a row of 128k, so one row is quick too
MAX_CHUNKS = 64  # of a row, all held by `cut`; larger vocabularies have longer chunks
MAX_VOCAB = MAX_CHUNKS * 2 * CHUNK
CANDIDATES = 2048  # searched without rereading the row
BLOCK = 2048  # candidates at a time
BINS = 256  # as in the kernel
CHUNK_PER_WARP = 512
ROW_WARPS = 8
_KERNELS = {
    "scan": kernels.scan_kernel,
    "weigh": kernels.weigh_kernel,
    "cut": kernels.cut_kernel,
    "gather": kernels.gather_kernel,
    "choose": kernels.choose_kernel,
}
_LAUNCHERS = {name: Launcher(kernel) for name, kernel in _KERNELS.items()}
BY_ROW = ("cut", "choose")  # one program for a row; of the others one for a chunk of it


class DeviceSampling:
    """Chooses tokens as `reference.sample` does, up to rounding of the probabilities.

    A CUDA graph can capture it: nothing is allocated after construction, and launches depend on the
    number of rows alone.

    Args:
        max_rows: most rows of one call.
        vocab_size: width of the logits.

    Raises:
        UnsupportedModelError: the vocabulary is larger than any that the kernels cover.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        check_vocabulary(vocab_size)
        self._max_rows, self._vocab_size = max_rows, vocab_size
        self._constexprs = constexprs(vocab_size)
        num_chunks = self._constexprs["CHUNKS"]
        self._options = {
            name: self._options_of(name, kernel.arg_names) for name, kernel in _KERNELS.items()
        }

        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty((max_rows, *shape), dtype=dtype, device=device)

        self._workspace = {
            "maxima_ptr": empty(torch.float32, num_chunks),
            "places_ptr": empty(torch.int32, num_chunks),
            "flags_ptr": empty(torch.int32, num_chunks),
            "masses_ptr": empty(torch.int64, num_chunks),
            "counts_ptr": empty(torch.int32, num_chunks, BINS),
            "cuts_ptr": empty(torch.int32),
            "starts_ptr": empty(torch.int32, num_chunks),
            "totals_ptr": empty(torch.int32),
            "values_ptr": empty(torch.float32, CANDIDATES),
            "ids_ptr": empty(torch.int32, CANDIDATES),
        }

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._workspace.values())

    def __call__(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """Choose one token per row, on the device.

        Args:
            logits: (num_rows, vocab_size) float32, each row contiguous; not changed.
            rows: settings of each row, on the same device.

        Returns:
            (num_rows,) int64 token ids; -1 for a row with NaN or without a finite value, -2 for one
            with +inf.
        """
        num_rows, vocab_size = logits.shape
        assert vocab_size == self._vocab_size, (vocab_size, self._vocab_size)
        assert num_rows <= self._max_rows, (num_rows, self._max_rows)
        assert logits.dtype is torch.float32, logits.dtype
        assert logits.stride(1) == 1, logits.stride()
        tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        if not num_rows:
            return tokens
        values = {
            **self._workspace,
            **_settings(rows, num_rows),
            "logits_ptr": logits,
            "tokens_ptr": tokens,
            "stride": logits.stride(0),
        }
        by_chunk, by_row = (num_rows, self._constexprs["NUM_CHUNKS"]), (num_rows,)
        with device_of(logits):
            for name, launch in _LAUNCHERS.items():
                own, options = self._options[name]
                arguments = tuple(values[key] for key in own)
                launch(by_row if name in BY_ROW else by_chunk, arguments, options)
        return tokens

    def _options_of(self, name: str, parameters: Sequence[str]) -> tuple[list[str], dict[str, int]]:
        """Return the names of a kernel's tensors and numbers, and its options."""
        fixed = {key: self._constexprs[key] for key in parameters if key in self._constexprs}
        own = [key for key in parameters if key not in fixed]
        return own, {**fixed, "num_warps": num_warps(name, self._vocab_size)}


def check_vocabulary(vocab_size: int) -> None:
    """Raise UnsupportedModelError, with what is supported, if no kernel covers the vocabulary."""
    if vocab_size > MAX_VOCAB:
        raise UnsupportedModelError(
            f"sampling on the GPU has no kernel for a vocabulary of {vocab_size}; "
            f"supported: up to {MAX_VOCAB}"
        )


def _settings(rows: SamplingRows, num_rows: int) -> dict[str, Tensor]:
    """Return the settings, each in the dtype that its kernels read."""
    found = {
        "temperature_ptr": (rows.temperature, torch.float32),
        "top_k_ptr": (rows.top_k, torch.int64),
        "top_p_ptr": (rows.top_p, torch.float32),
        "min_p_ptr": (rows.min_p, torch.float32),
        "uniform_ptr": (rows.uniform, torch.float64),
    }
    for name, (values, dtype) in found.items():
        assert values.dtype is dtype, f"{name}: {values.dtype} where {dtype} is read"
        assert values.shape == (num_rows,), f"{name}: {values.shape} beside {num_rows} rows"
        assert values.is_contiguous(), name
    return {name: values for name, (values, _) in found.items()}


def chunk_of(vocab_size: int) -> int:
    """Return the logits of one program: CHUNK, or twice as many for a large vocabulary."""
    return CHUNK if vocab_size <= MAX_CHUNKS * CHUNK else 2 * CHUNK


def constexprs(vocab_size: int) -> dict[str, int]:
    """Return the compile-time arguments of the kernels; each takes some of these."""
    chunk = chunk_of(vocab_size)
    num_chunks = -(-vocab_size // chunk)
    return {
        "VOCAB": vocab_size,
        "NUM_CHUNKS": num_chunks,
        "CHUNK": chunk,
        "CHUNKS": max(2, 1 << (num_chunks - 1).bit_length()),
        "CANDIDATES": CANDIDATES,
        "BLOCK": BLOCK,
    }


def num_warps(kernel: str, vocab_size: int) -> int:
    """Return the warps of a program of "scan", "weigh", "cut", "gather" or "choose"."""
    return ROW_WARPS if kernel == "cut" else chunk_of(vocab_size) // CHUNK_PER_WARP
