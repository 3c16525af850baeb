"""Runs the residual streams of a model's variants through its layers, one layer at a time.

Streams are memory-mapped files; memory holds one layer of one model's weights.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from appliance.errors import ModelError, QuantizeError
from appliance.kernels.backend import REFERENCE, select_backend
from appliance.kernels.cache.decoder_cache import allocate_layer
from appliance.kernels.cache.kv_format import KVFormat, LayerPrecision
from appliance.kernels.int8_matmul.reference import RoundingLinear
from appliance.kernels.kv_write.reference import rotate_and_write_with
from appliance.kernels.packed_matmul.reference import dense_linear
from appliance.model.attention import Attention, LatentAttention
from appliance.model.layer_builder import LayerBuilder
from appliance.model.layers import MLP
from appliance.model.prompt_layers import with_linears
from appliance.quant.quality.card import LayerError
from appliance.quant.walk.row_layers import BLOCK_SIZE, RowSteps

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from appliance.kernels.operations import Backend, Linear
    from appliance.kernels.weights.weight import Weight
    from appliance.model.layers import DecoderLayer, MixerCache
    from appliance.model.norm import Norm
    from appliance.model.step import Step
    from appliance.quant.quality.weight_sets import WeightSet

FLOAT = torch.float32
# Names of variants.
BASE, CANDIDATE, ROUNDED, PROMPT_INT8 = "base", "candidate", "rounded", "prompts in int8"


@dataclass(frozen=True, slots=True)
class ModelVariant:
    """One way to compute the model.

    Attributes:
        name: unique; part of file names.
        kv: precision of keys and values per layer; None is float32.
        num_windows: run on only the first so many windows; None is all.
        is_traced: compare its layers with the first variant's.
        int8_group: inputs of linears that share a scale, rounded to int8 as those of
            `model.prompt_layers` are; None leaves them as they are.
    """

    name: str
    weights: WeightSet
    kv: tuple[LayerPrecision, ...] | None = None
    num_windows: int | None = None
    is_traced: bool = False
    int8_group: int | None = None


class TappedLinear:
    """A `kernels.operations.Linear` that keeps its last result."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.nbytes = linear.nbytes
        self.result: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """(num_tokens, in_features) -> (num_tokens, out_features)."""
        self.result = self._linear(x)
        return self.result


class Streams:
    """The residual streams of all variants.

    Args:
        variants: layer errors compare with the first.
        windows: (num_windows, window) int64.
        folder: for files; 4 bytes per token and hidden element, for each variant and two more.
        tokens_at_once: tokens that pass through a layer together, at least a window.
    """

    def __init__(
        self,
        variants: list[ModelVariant],
        windows: Tensor,
        folder: Path,
        device: torch.device,
        tokens_at_once: int,
    ) -> None:
        self.variants = variants
        self._windows_at_once = max(1, tokens_at_once // windows.shape[1])
        self._windows = windows
        self._device = device
        spec = variants[0].weights.source.spec
        self._hidden_size = spec.hidden_size
        self._backend = _with_every_cache(device)
        self._steps = {
            id(weights): RowSteps(weights.source.spec, windows.shape[1], self._backend, device)
            for weights in self._weight_sets()
        }
        self._streams = {variant.name: self._map(folder, variant.name) for variant in variants}
        self._added = {part: self._map(folder, f"base-{part}") for part in ("attention", "mlp")}
        for weights in self._weight_sets():
            # Only rows of tokens that occur, so that one pass over the matrix finds them.
            found, where = windows.unique(return_inverse=True)
            rows = weights.embed(found.to(device)).cpu()
            for variant in self._of(weights):
                stream = self._streams[variant.name]
                for index, tokens in enumerate(where[: len(stream)]):
                    stream[index] = rows[tokens]

    def layer(self, index: int) -> dict[str, LayerError]:
        """Run all variants through a layer; return the errors of the traced ones."""
        errors: dict[str, LayerError] = {}
        for weights in self._weight_sets():
            spec = weights.source.spec
            builder = LayerBuilder(_tapping(self._backend), FLOAT, spec)
            loaded = weights.layer(index)
            # The norm after a layer is applied at the start of the next one.
            assert loaded.first_norm is not None, "refused before"
            layer = builder.layer(index, loaded, spec.layers[index], loaded.first_norm)
            del loaded
            norm = layer.next_norm
            assert norm is not None, "refused before"
            is_last = index == len(spec.layers) - 1
            for variant in self._of(weights):
                own = layer
                if variant.int8_group is not None and not is_last:
                    own = with_linears(layer, partial(_rounding, variant.int8_group))
                error = self._run(variant, own, norm, index)
                if variant.is_traced:
                    errors[variant.name] = error
            del layer
        return errors

    def hidden(self, variant: ModelVariant, window: int, rows: slice, norm: Norm) -> Tensor:
        """Return the normed stream of some rows of a window, (num_rows, hidden_size)."""
        stream = self._streams[variant.name][window, rows].to(self._device)
        return norm.of(stream, self._backend)

    def _weight_sets(self) -> Iterator[WeightSet]:
        yield from {id(variant.weights): variant.weights for variant in self.variants}.values()

    def _of(self, weights: WeightSet) -> Iterator[ModelVariant]:
        return (variant for variant in self.variants if variant.weights is weights)

    def _map(self, folder: Path, name: str) -> Tensor:
        count = next((v.num_windows for v in self.variants if v.name == name), None)
        count = len(self._windows) if count is None else count
        shape = (count, self._windows.shape[1], self._hidden_size)
        path = folder / name
        size = shape[0] * shape[1] * shape[2]
        _reserve(path, size * FLOAT.itemsize)
        return torch.from_file(str(path), shared=True, size=size, dtype=FLOAT).view(shape)

    def _run(
        self, variant: ModelVariant, layer: DecoderLayer, norm: Norm, index: int
    ) -> LayerError:
        base = self._streams[self.variants[0].name]
        stream = self._streams[variant.name]
        is_base = variant is self.variants[0]
        spec = variant.weights.source.spec
        place = spec.cache_places[index] if index in spec.cache_layers else None
        sums = {part: _Relative() for part in ("stream", "attention", "mlp")}
        at_once = self._windows_at_once
        for start in range(0, len(stream), at_once):
            rows = slice(start, min(start + at_once, len(stream)))
            before = stream[rows].flatten(0, 1).to(self._device)
            kv = LayerPrecision(KVFormat.FP32)
            if variant.kv is not None and place is not None:
                kv = variant.kv[place]
            step, cache = self._step(variant, kv, layer, rows.stop - rows.start)
            hidden = norm.of(before, self._backend)
            _, after = layer(hidden, before, step, cache, None)
            nothing = torch.zeros_like(after)
            mixed = nothing if layer.mixer is None else _result(layer.mixer.output)
            found = {"attention": mixed, "mlp": nothing}
            if isinstance(layer.mlp, MLP):
                found["mlp"] = _result(layer.mlp.down)
            elif layer.mlp is not None:  # the part that the mixer did not add
                norm_after = layer.mixer_post_norm
                added = mixed if norm_after is None else norm_after.of(mixed, self._backend)
                found["mlp"] = after - before - added
            if not bool(torch.isfinite(after).all()):
                name = variant.weights.source.path.name
                raise ModelError(f"{name}: layer {index} makes NaN or infinity of this text")
            stream[rows] = after.view(-1, *stream.shape[1:]).cpu()
            for part, value in found.items():
                added = value.view(-1, *stream.shape[1:]).cpu()
                if is_base:
                    self._added[part][rows] = added
                elif variant.is_traced:
                    sums[part].add(self._added[part][rows], added)
            if variant.is_traced:
                sums["stream"].add(base[rows], stream[rows])
        return LayerError(**{part: relative.value for part, relative in sums.items()})

    def _step(
        self, variant: ModelVariant, kv: LayerPrecision, layer: DecoderLayer, count: int
    ) -> tuple[Step, MixerCache | None]:
        steps = self._steps[id(variant.weights)]
        if layer.mixer is None:
            return steps.step(count), None
        if not isinstance(layer.mixer, Attention | LatentAttention):
            return steps.step(count), layer.mixer.fresh_state(count, self._device)
        num_blocks = count * steps.row_blocks
        spec = layer.mixer.spec
        cache = allocate_layer(
            self._backend.allocate_cache,
            kv,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            num_open=num_blocks,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            device=self._device,
        )
        return steps.step(count, is_sealed=kv.format.is_sealed), cache


class _Relative:
    """The norm of all differences over the norm of the base."""

    def __init__(self) -> None:
        self._difference = 0.0
        self._base = 0.0

    def add(self, base: Tensor, other: Tensor) -> None:
        self._difference += float(torch.linalg.vector_norm(other - base)) ** 2
        self._base += float(torch.linalg.vector_norm(base)) ** 2

    @property
    def value(self) -> float:
        """The ratio; 0 if the base's norm is 0."""
        return math.sqrt(self._difference / self._base) if self._base else 0.0


def _reserve(path: Path, size: int) -> None:
    """Reserve a file's blocks, or raise QuantizeError: a full disk would kill a mapped write."""
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        raise QuantizeError(
            f"an evaluation keeps its residual streams in {path.parent.parent}, of"
            f" {size / 2**20:,.1f} MiB each: {error.strerror}; make room there or read fewer tokens"
        ) from error


def _with_every_cache(device: torch.device) -> Backend:
    """Return a device's operations with caches of every format, which GPU kernels lack."""
    backend = select_backend(device)
    if device.type == "cpu":
        return backend
    return replace(
        backend,
        write_kv=REFERENCE.write_kv,
        rotate_and_write=rotate_and_write_with(
            backend.rms_norm, backend.rotary, REFERENCE.write_kv
        ),
        seal_kv=REFERENCE.seal_kv,
        allocate_cache=REFERENCE.allocate_cache,
        plan_attention=REFERENCE.plan_attention,
        paged_attention=REFERENCE.paged_attention,
        write_latents=REFERENCE.write_latents,
        latent_attention=REFERENCE.latent_attention,
    )


def _tapping(backend: Backend) -> Backend:
    """Return the backend with dense float32 linears that keep their last results."""

    def prepare(weight: Weight, bias: Tensor | None, dtype: torch.dtype) -> TappedLinear:
        return TappedLinear(dense_linear(weight, bias, dtype))

    return replace(backend, prepare_linear=prepare)


def _rounding(group_size: int, linear: object) -> TappedLinear | None:
    if not isinstance(linear, TappedLinear):
        return None
    return TappedLinear(RoundingLinear(linear, group_size))


def _result(linear: object) -> Tensor:
    assert isinstance(linear, TappedLinear)
    assert linear.result is not None
    return linear.result
