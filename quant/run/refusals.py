"""Refuses a run before its work: a model that is quantized, kinds not calibrated, a full disk."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from appliance.errors import QuantizeError
from appliance.model_files.checkpoint import read_config
from appliance.quant.walk.places import check_walked, is_plain
from appliance.quant.walk.slopes import measured_rows, slope_bytes
from appliance.quant.walk.walk import disk_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.model.source import ModelSource
    from appliance.quant.run.options import QuantizeOptions
    from appliance.quant.run.run import QuantizeRun
    from appliance.quant.run.staging import StagingFolders
    from appliance.quant.text.calibration import Calibration


_NOT_BY_LAYER = (
    "embeddings of each layer or of positions, layers that share keys, or norms only behind them"
)


def why_not_measured(source: ModelSource) -> str:
    """Say why a model has no quality card; "" if it has one."""
    if source.fallback is None:
        return ""
    return (
        f"transformers' modules execute {source.fallback.name}, and no code here runs its layers"
        " one by one"
    )


def why_not_calibrated(source: ModelSource) -> str:
    """Say why no method with text works for a model; "" if they do."""
    if source.fallback is not None or source.spec.goes_layer_by_layer:
        return why_not_measured(source)
    return f"{source.path.name} has {_NOT_BY_LAYER}"


def refuse_uncalibrated(source: ModelSource, options: QuantizeOptions) -> None:
    """Refuse options that read text but do not support a kind of layer of the model."""
    asked = {
        f"--method {options.method.value}": options.method.needs_text,
        "--mixed": options.mixed is not None,
        "--kv-bits": options.kv_bits is not None,
    }
    spec, attention = source.spec, source.spec.attention_layers.values()
    kinds = {_NOT_BY_LAYER: not spec.goes_layer_by_layer}
    of_heads = {
        "recurrent layers": spec.state_bytes > 0,
        "latent attention": bool(spec.latent_layers),
        "norms of values": any(a.value_norm for a in attention),
    }
    of_linears = {
        "experts": spec.has_experts,
        "layers that are not attention and an MLP with gates": not all(map(is_plain, spec.layers)),
    }
    for what in (what for what, is_asked in asked.items() if is_asked):
        check_walked(source, f"no {what} of it: use --method rtn, int8 or fp8, with --no-card")
    if options.card_tokens:
        check_walked(source, "no quality card of it: add --no-card")
    lacks = {"--mixed": kinds | of_heads | of_linears, "--kv-bits": kinds | of_heads}
    for what, is_asked in asked.items():
        found = [kind for kind, is_there in lacks.get(what, kinds).items() if is_there]
        if is_asked and found:
            raise QuantizeError(
                f"{source.path.name} has {found[0]}, which {what} does not calibrate; use --method "
                "rtn, int8 or fp8 without it, which need no text"
            )


def refuse_quantized(model_path: Path) -> None:
    if not model_path.is_dir():
        return
    config = read_config(model_path).get("quantization_config")
    if config is not None:
        method = config.get("quant_method") if isinstance(config, dict) else config
        raise QuantizeError(
            f"{model_path} is quantized already, with {method!r}; quantize the 16-bit model that"
            " it was made from"
        )


def refuse_unsaid(source: ModelSource) -> None:
    """Refuse a GGUF model that no config.json of its family describes, as its biases do."""
    # A class of transformers is described from the settings alone.
    is_described = source.path.is_file() and source.fallback is None
    if is_described and source.family.spec(source.config) != source.spec:
        raise QuantizeError(
            f"{source.path} has biases that the config.json of a {source.family.model_type} model "
            "cannot say, so a folder of it would be another model; use --format gguf"
        )


def check_space(run: QuantizeRun, staging: StagingFolders, calibration: Calibration | None) -> None:
    result = sum(tensor.nbytes for tensor in run.plan.tensors)
    if run.projector is not None:
        result += run.projector.nbytes
    work = 0
    if calibration is not None:
        work = disk_bytes(run.source.spec, calibration.rows)
        if run.options.method.weighs_outputs:
            work = max(work, slope_bytes(run.source.spec, measured_rows(calibration.rows)))
    there = sum(path.stat().st_blocks * 512 for path in staging.folder.rglob("*"))
    free = shutil.disk_usage(staging.out.parent).free
    if result + work > there + free:
        raise QuantizeError(
            f"the result needs {result / 2**20:,.0f} MiB"
            + (f" and the work on it {work / 2**20:,.0f} MiB" * bool(work))
            + f", but {staging.out.parent} has {(there + free) / 2**20:,.0f} MiB free; make room or"
            " choose another --out"
        )
