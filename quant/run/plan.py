"""Decides the stored form of every tensor before reading any."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from appliance.errors import ConfigError, QuantizeError
from appliance.model.tensors import Role
from appliance.model_files.gguf_names import parts_of
from appliance.quant.formats.ggml_blocks import GGUFStore
from appliance.quant.formats.scheme import Fp8Scheme, WeightScheme
from appliance.quant.formats.store import (
    CompressedTensorsStore,
    TrellisStore,
    awq_writer,
    gptq_writer,
)
from appliance.quant.gguf.mixes import MIXES
from appliance.quant.quality.readers import forms_of
from appliance.quant.run.options import ResultReader, WeightFormat, end_scheme
from appliance.quant.run.other_parts import OtherPart, config_with, other_parts
from appliance.quant.run.shard_writer import TensorLayout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from appliance.model.source import ModelSource
    from appliance.model.tensors import TensorSlot
    from appliance.quant.formats.scheme import LinearScheme
    from appliance.quant.formats.store import Weights, WeightStore
    from appliance.quant.quality.readers import Form
    from appliance.quant.run.options import QuantizeOptions

_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of the model and its stored form.

    Attributes:
        scheme: its quantization; None keeps 16 bits.
        stored: the tensors it becomes.
        part: it belongs to; None for the decoder's.
    """

    slot: TensorSlot
    scheme: LinearScheme | None
    stored: tuple[TensorLayout, ...]
    part: OtherPart | None = None

    @property
    def name(self) -> str:
        return self.slot.name

    @property
    def role(self) -> Role:
        return self.slot.role

    @property
    def shape(self) -> tuple[int, ...]:
        """(out_features, in_features) of a linear weight."""
        return self.slot.shape

    @property
    def module(self) -> str:
        """Its linear, as transformers names it."""
        own = self.name.removesuffix(_WEIGHT)
        return own if self.part is None else self.part.modules.get(self.name, own)

    @property
    def nbytes(self) -> int:
        return sum(layout.nbytes for layout in self.stored)


@dataclass(frozen=True, slots=True)
class QuantizePlan:
    """All tensors in the model's order.

    Attributes:
        dtype: of scales and unquantized tensors.
        tensors: in the order of use, other parts' last.
        kept: modules of linear weights that stay dense: widths that no group divides, routers,
            other parts.
        notes: one line per reason why weights do not get the requested scheme.
    """

    dtype: torch.dtype
    tensors: tuple[PlannedTensor, ...]
    kept: tuple[str, ...]
    notes: tuple[str, ...]
    store: WeightStore

    def layouts(self) -> list[TensorLayout]:
        return [layout for tensor in self.tensors for layout in tensor.stored]

    def model_config(self, source: ModelSource) -> dict[str, Any]:
        """Derive the result's config.json from the source's."""
        schemes = {
            tensor.module: tensor.scheme for tensor in self.tensors if tensor.scheme is not None
        }
        quantized = {tensor.role for tensor in self.tensors if tensor.scheme is not None}
        ignore = [] if Role.HEAD in quantized else ["lm_head"]
        named = Role.EMBEDDING in quantized
        kept = {key: value for key, value in source.config.items() if key != "torch_dtype"}
        config = kept | {
            "dtype": str(self.dtype).removeprefix("torch."),
            "quantization_config": self.store.config(schemes, [*ignore, *self.kept], named=named),
        }
        parts = {tensor.part for tensor in self.tensors if tensor.part is not None}
        return config_with(parts, source, config)


def make_plan(
    source: ModelSource,
    options: QuantizeOptions,
    dtype: torch.dtype,
    chosen: Mapping[str, LinearScheme | None] | None = None,
) -> QuantizePlan:
    """Plan a model: quantize the layers' linears, and embedding and head on request.

    Other parts of the checkpoint stay in 16 bits. `chosen` maps linear weights to schemes that
    differ from the rest.

    Raises:
        ConfigError: the format cannot hold the weights, or the bits of embedding or head are not
            supported.
        QuantizeError: the scheme fits no weight.
    """
    slots, ends = source.slots(), end_schemes(source, options)
    found: dict[str, LinearScheme | None] = {}
    reasons: dict[str, list[str]] = defaultdict(list)
    kept: list[str] = []
    for slot in slots:
        fitted: LinearScheme | None = None
        wanted = _wanted(source, slot, options, chosen or {}) if slot.is_linear else None
        wanted = ends.get(slot.role, wanted)
        if wanted is not None:
            fitted, reason = wanted.fit(slot.shape[1])
            if reason:
                reasons[reason].append(slot.name)
        stays = slot.role.decides and slot.name.endswith(_WEIGHT)
        if stays or (slot.is_linear and fitted is None):
            kept.append(slot.name.removesuffix(_WEIGHT))
        found[slot.name] = fitted
    if not any(found.values()):
        raise QuantizeError(f"nothing to quantize: every linear weight is {'; '.join(reasons)}")
    notes = [f"{len(names)} weights {reason}" for reason, names in reasons.items()]
    if chosen is not None:
        counts = Counter("16 bits" if s is None else str(s) for s in map(found.get, chosen))
        notes += [f"{count} weights of {what}" for what, count in sorted(counts.items())]
    if options.format is WeightFormat.COMPRESSED_TENSORS:
        forms = forms_of(source, slots, found)
        _refuse_unread(options.reader, forms)
        notes += [form.note for form in forms if form.note]
    store = choose_store(options.format, slots, found)
    tensors = [_planned(slot, found[slot.name], dtype, store) for slot in slots]
    if options.format is WeightFormat.GGUF:
        return QuantizePlan(dtype, tuple(tensors), tuple(kept), tuple(notes), store)
    parts, more = other_parts(source, options.tower_bits)
    for part in parts:
        for slot in part.slots:
            scheme = part.schemes.get(slot.name)
            planned = _planned(slot, scheme, dtype, store)
            stored = planned.stored if scheme else (part.layout(slot, dtype),)
            tensors.append(replace(planned, stored=stored, part=part))
        kept += part.linears
        if options.format is WeightFormat.COMPRESSED_TENSORS:
            kept += part.patterns
    return QuantizePlan(dtype, tuple(tensors), tuple(kept), (*notes, *more), store)


def _refuse_unread(reader: ResultReader | None, forms: Sequence[Form]) -> None:
    """Raise ConfigError if the program that must read the result does not."""
    for form in forms:
        able = {ResultReader.TRANSFORMERS: form.in_transformers, ResultReader.VLLM: form.in_vllm}
        if reader is not None and not able.get(reader, True):
            raise ConfigError(f"--for {reader.value}: {form.note}")


def _wanted(
    source: ModelSource,
    slot: TensorSlot,
    options: QuantizeOptions,
    chosen: Mapping[str, LinearScheme | None],
) -> LinearScheme | None:
    """Return the scheme of a layer's linear weight, whose width may not allow it."""
    if options.file_type:
        return MIXES[options.file_type].scheme_of(slot, source.spec)
    return chosen.get(slot.name, options.scheme)


def choose_store(
    format: WeightFormat, slots: Sequence[TensorSlot], schemes: Mapping[str, LinearScheme | None]
) -> WeightStore:
    """Return a format's store for these schemes; raise ConfigError if it cannot hold them."""
    if format is WeightFormat.COMPRESSED_TENSORS:
        return CompressedTensorsStore()
    if format is WeightFormat.TRELLIS:
        return TrellisStore()
    if format is WeightFormat.GGUF:
        return GGUFStore.of(schemes)
    weights: Weights = {}
    for slot in slots:
        scheme = schemes.get(slot.name)
        if scheme is None:
            continue
        if not isinstance(scheme, WeightScheme) or not slot.is_linear:
            what = "FP8 weights" if isinstance(scheme, Fp8Scheme) else f"a quantized {slot.name}"
            raise ConfigError(
                f"--format {format.value} does not hold {what}; use --format compressed-tensors"
            )
        weights[slot.name] = (slot.shape[0], slot.shape[1]), scheme
    return awq_writer(weights) if format is WeightFormat.AWQ else gptq_writer(weights)


def end_schemes(source: ModelSource, options: QuantizeOptions) -> dict[Role, LinearScheme]:
    """Return the schemes of embedding and head, unless they stay in 16 bits.

    A tied matrix is stored as the embedding.

    Raises:
        ConfigError: unsupported bits, or `--embedding` for a tied embedding.
    """
    tied = source.spec.tied_head
    if tied and options.embedding not in (None, 16):
        raise ConfigError("the embedding of this model is its head too; give --head BITS alone")
    bits = {
        Role.EMBEDDING: options.head_bits if tied else options.embedding_bits,
        Role.HEAD: options.head_bits,
    }
    asked = {role: end_scheme(n, options.scheme) for role, n in bits.items()}
    return {role: scheme for role, scheme in asked.items() if scheme is not None}


def _planned(
    slot: TensorSlot, scheme: LinearScheme | None, dtype: torch.dtype, store: WeightStore
) -> PlannedTensor:
    if scheme is None:
        # A router's bias has few numbers, and rounding them would change its choices; programs
        # that read GGUF files expect all vectors in float32.
        is_vector = len(slot.shape) == 1
        is_exact = is_vector and (slot.role.decides or isinstance(store, GGUFStore))
        layouts = {slot.name: (torch.float32 if is_exact else dtype, slot.shape)}
    else:
        layouts = store.layout(slot.name, (slot.shape[0], slot.shape[1]), scheme, dtype)
    stored = tuple(TensorLayout(name, *layout) for name, layout in layouts.items())
    return PlannedTensor(slot, scheme, stored)


def growth_note(source: ModelSource, plan: QuantizePlan) -> str | None:
    """Return a note if the result is larger than its source, else None."""
    path = source.path
    files = parts_of(path) if path.is_file() else path.glob("*.safetensors")
    before = sum(file.stat().st_size for file in files)
    after = sum(tensor.nbytes for tensor in plan.tensors)
    if after <= before:
        return None
    return (
        f"the result is larger than what it is made from: {after / 2**20:,.1f} MiB, and {path.name}"
        f" has {before / 2**20:,.1f} MiB; serve that as it is, or ask for fewer bits with --bits,"
        " --mixed or --head"
    )


def stored_dtype(
    source: ModelSource, format: WeightFormat = WeightFormat.COMPRESSED_TENSORS
) -> torch.dtype:
    """Return float16 if the model or the format uses it, else bfloat16, whose range is wider."""
    if format is WeightFormat.GGUF:
        return torch.float16
    dtype = source.config.get("dtype", source.config.get("torch_dtype"))
    return torch.float16 if dtype == "float16" else torch.bfloat16
