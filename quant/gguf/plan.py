"""Plans the GGUF file of a quantize run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.errors import QuantizeError
from appliance.quant.formats.ggml_blocks import type_of_scheme
from appliance.quant.gguf.file_writer import PlannedFile, TypedTensor
from appliance.quant.gguf.from_checkpoint import check_as_read, settings_of
from appliance.quant.gguf.settings import FileSettings
from appliance.quant.gguf.tensors import file_tensors
from appliance.quant.walk.places import is_plain

if TYPE_CHECKING:
    from appliance.model.source import ModelSource
    from appliance.quant.run.options import Method
    from appliance.quant.run.plan import QuantizePlan


def plan_file(source: ModelSource, plan: QuantizePlan, method: Method) -> PlannedFile:
    """Plan the file, with settings and tokenizer of the model that is quantized.

    Raises:
        QuantizeError: no GGUF file of such a model is written here; says why.
    """
    tensors = file_tensors(source)
    if method.needs_text and not all(map(is_plain, source.spec.layers)):
        raise QuantizeError(
            f"{source.path} has layers that are not attention and an MLP with gates, which"
            f" --method {method.value} does not quantize for --format gguf; use --method rtn"
        )
    planned = []
    stored = {tensor.name: tensor for tensor in plan.tensors}
    for tensor in tensors:
        found = stored[tensor.slot.name]
        (layout,) = found.stored
        if found.scheme is None:
            planned.append(TypedTensor.plain(tensor, layout))
        else:
            kind = type_of_scheme(found.name, found.scheme)
            planned.append(TypedTensor(tensor, kind, layout))
    if source.path.is_file():
        return PlannedFile.of(FileSettings.of_file(source.path), planned)
    settings = settings_of(source)
    check_as_read(source, settings, planned)
    return PlannedFile.of(settings, planned)
