"""Converts a quantized model to another format with the same codes, or to 16 bits."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from appliance.errors import ConfigError, QuantizeError
from appliance.kernels.weights.fp4 import Fp4Weight
from appliance.kernels.weights.fp8 import Fp8Weight
from appliance.kernels.weights.ggml import GgmlWeight
from appliance.kernels.weights.packed import PackedWeight
from appliance.kernels.weights.trellis import TrellisWeight
from appliance.kernels.weights.weight import dense
from appliance.model.adapters.reader import FACTORS_NAME
from appliance.model.source import open_model
from appliance.model_files.checkpoint import CONFIG_NAME, QUANTIZATION
from appliance.quant.formats.exl3 import Exl3Weights
from appliance.quant.formats.kv_plan import FILE as KV_PLAN
from appliance.quant.formats.kv_plan import KEY_SCALES, VALUE_SCALES
from appliance.quant.formats.pack import zero_points_of
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.formats.word_packed import WEIGHT
from appliance.quant.quality.facts import facts_of_run, write_facts
from appliance.quant.run.options import MAX_SHARD_BYTES, WeightFormat
from appliance.quant.run.other_parts import config_with, other_parts
from appliance.quant.run.plan import choose_store, stored_dtype
from appliance.quant.run.refusals import refuse_unsaid
from appliance.quant.run.shard_writer import ShardWriter, TensorLayout
from appliance.quant.run.staging import check_destination, staged_folder
from appliance.quant.run.tokenizer_files import write_tokenizer_files
from appliance.quant.walk.pieces import PIECE_ELEMENTS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from appliance.model.source import ModelSource
    from appliance.model.tensors import TensorSlot
    from appliance.quant.formats.store import WeightStore

DENSE = "dense"  # a folder of 16 bits, as a command names it


@dataclass(frozen=True, slots=True)
class Repacked:
    """The result of a conversion.

    Attributes:
        store: the new format of its linear weights; None: they have 16 bits.
        notes: one line per difference from the original.
    """

    store: WeightStore | None
    notes: tuple[str, ...]


def repack_model(
    model_path: Path,
    out: Path,
    format: WeightFormat | None,
    *,
    overwrite: bool = False,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> Repacked:
    """Write a quantized model in another format, with its KV cache plan.

    For AWQ and GPTQ each weight is read twice: for its scheme, then to be written.

    Args:
        model_path: a folder, or a .gguf file; for AWQ and GPTQ its weights have zero points.
        format: AWQ or GPTQ; None: weights of 16 bits, as any program reads them.
        on_progress: called with a stage, the number of weights done, and their total.

    Raises:
        CheckpointError: the model is damaged.
        ConfigError: the format cannot hold these weights.
        QuantizeError: the model is not quantized, or its form has no equivalent.
    """
    out = out.resolve()
    report = on_progress or (lambda stage, done, total: None)
    try:
        check_destination(out, model_path.resolve(), overwrite=overwrite)
        source = open_model(model_path)
        refuse_unsaid(source)
        slots = source.slots()
        parts, notes = other_parts(source)
        found: dict[str, WeightScheme] = {}
        if not any(_is_quantized(source, slot) for slot in slots):
            raise QuantizeError(
                f"{model_path} has no quantized weights to store in another way; quantize it first"
            )
        if format not in (None, WeightFormat.AWQ, WeightFormat.GPTQ):
            raise ConfigError(
                f"a quantized model is stored anew with --format awq, gptq, gguf or {DENSE}"
            )
        for index, slot in enumerate(slots if format else ()):
            report("looking", index, len(slots))
            if slot.is_linear and _is_quantized(source, slot):
                found[slot.name] = _scheme(source, slot)
        store = choose_store(format, slots, found) if format else None
        dtype = stored_dtype(source)
        with staged_folder(out) as staging:
            layouts = [
                layout
                for slot in slots
                for layout in _layouts(slot, store, found.get(slot.name), dtype)
            ]
            layouts += [part.layout(slot, dtype) for part in parts for slot in part.slots]
            scales = {} if store is None else _kv_scales(source)
            layouts += [TensorLayout(n, t.dtype, tuple(t.shape)) for n, t in scales.items()]
            with ShardWriter(staging, layouts, MAX_SHARD_BYTES) as shards:
                for index, slot in enumerate(slots):
                    report("writing", index, len(slots))
                    if store is not None and slot.name in found:
                        value = source.weights.load(slot.name)
                        assert isinstance(value, PackedWeight), slot.name
                        tensors = store.encode(slot.name, value, found[slot.name])
                    else:
                        tensors = {slot.name: _dense(source, slot.name, dtype)}
                    for name, tensor in tensors.items():
                        shards.write(name, [tensor])
                for part in parts:
                    for slot in part.slots:
                        stored = part.layout(slot, dtype).dtype
                        shards.write(slot.name, part.rows(slot, stored, PIECE_ELEMENTS))
                for name, tensor in scales.items():
                    shards.write(name, [tensor])
            kept = [
                slot.name.removesuffix(WEIGHT)
                for slot in slots
                if slot.is_linear and slot.name not in found
            ]
            kept += [module for part in parts for module in part.linears]
            config = {key: value for key, value in source.config.items() if key != "torch_dtype"}
            config["dtype"] = str(dtype).removeprefix("torch.")
            config.pop(QUANTIZATION, None)
            if store is not None:
                quantization = store.config(found, ["lm_head", *kept], named=False)
                config[QUANTIZATION] = quantization | _kv_scheme(source)
            config = config_with(parts, source, config)
            text = json.dumps(config, indent=2, ensure_ascii=False)
            (staging / CONFIG_NAME).write_text(text + "\n", encoding="utf-8")
            write_tokenizer_files(model_path, staging)
            for beside in (KV_PLAN, FACTORS_NAME):
                if (model_path / beside).is_file():
                    shutil.copyfile(model_path / beside, staging / beside)
            facts = facts_of_run(model_path)
            if facts is not None and store is not None:
                write_facts(facts, staging)
    except OSError as error:
        raise QuantizeError(
            f"cannot write {out}: {error.strerror}; nothing was left there"
        ) from error
    report("writing", len(slots), len(slots))
    if format is not None:
        notes += source.weights.notes()
        notes += tuple(
            f"{slot.name} goes from {bits} bits back to 16: {format.value} holds linear weights"
            " only"
            for slot in slots
            if slot.name not in found
            and (bits := source.weights.packed_bits(slot.name)) is not None
        )
    return Repacked(store, notes)


def _is_quantized(source: ModelSource, slot: TensorSlot) -> bool:
    weights = source.weights
    return (weights.packed_bits(slot.name) or weights.float_bits(slot.name)) is not None


def _dense(source: ModelSource, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Read a tensor in 16 bits; of EXL3 as it is meant, not as it is held."""
    weights = source.weights
    exact = weights.unpacked(name) if isinstance(weights, Exl3Weights) else weights.load(name)
    return dense(exact, dtype)


def _layouts(
    slot: TensorSlot, store: WeightStore | None, scheme: WeightScheme | None, dtype: torch.dtype
) -> list[TensorLayout]:
    if store is None or scheme is None:
        return [TensorLayout(slot.name, dtype, slot.shape)]
    layout = store.layout(slot.name, (slot.shape[0], slot.shape[1]), scheme, dtype)
    return [TensorLayout(name, *part) for name, part in layout.items()]


def _kv_scales(source: ModelSource) -> dict[str, torch.Tensor]:
    endings = (*KEY_SCALES, *VALUE_SCALES)
    names = [name for name in source.weights.tensor_names() if name.endswith(endings)]
    return {name: dense(source.weights.load(name), torch.float32) for name in names}


def _kv_scheme(source: ModelSource) -> dict[str, Any]:
    scheme = source.config.get("quantization_config", {}).get("kv_cache_scheme")
    return {} if scheme is None else {"kv_cache_scheme": scheme}


def _scheme(source: ModelSource, slot: TensorSlot) -> WeightScheme:
    weight = source.weights.load(slot.name)
    if isinstance(weight, GgmlWeight):
        _refuse(slot, f"the type {weight.type_name}")
    if isinstance(weight, TrellisWeight):
        _refuse(slot, "symbols of a trellis")
    if isinstance(weight, Fp8Weight | Fp4Weight):
        _refuse(slot, "codes that are floating-point numbers")
    assert isinstance(weight, PackedWeight), slot.name
    if weight.input_order is not None:
        _refuse(slot, "inputs in an order of their own (act-order)")
    zero_points = zero_points_of(weight)
    if zero_points is None:
        _refuse(slot, "offsets that are no zero points")
    symmetric = bool((zero_points == 1 << (weight.bits - 1)).all())
    row = weight.shape[1] == weight.group_size
    return WeightScheme(weight.bits, None if row else weight.group_size, symmetric)


def _refuse(slot: TensorSlot, what: str) -> NoReturn:
    raise QuantizeError(
        f"{slot.name} has {what}, which no other format holds without loss; --format {DENSE} writes"
        " 16 bits, which any program reads"
    )
