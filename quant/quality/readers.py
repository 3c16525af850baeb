"""Lists the programs that can read a checkpoint, by its format and the form of its weights.

Statements about other engines come from trials: transformers 5.24 with compressed-tensors 0.20
loaded results of each form, and vLLM 0.11's own classes made the parameters for them; of gptqmodel,
SGLang and TGI, and of vLLM and 4-bit floats, from their documents and sources.
"""

from __future__ import annotations

from collections import defaultdict
from enum import Enum
from typing import TYPE_CHECKING, Any

from appliance.errors import UnsupportedModelError
from appliance.model.expert_tensors import SeparatedExperts
from appliance.model.tensors import Role
from appliance.quant.formats.compressed_tensors_config import declared_weights
from appliance.quant.formats.scheme import Fp4Scheme, WeightScheme

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from appliance.model.source import ModelSource
    from appliance.model.tensors import TensorSlot
    from appliance.quant.formats.scheme import LinearScheme

OURS = "appliance"

_FUSED = {
    **dict.fromkeys((Role.QUERY, Role.KEY, Role.VALUE), "attention"),
    **dict.fromkeys((Role.GATE, Role.UP), "MLP"),
}


class Form(Enum):
    """A form of stored weights: its name, who reads it, and what to take for those who do not.

    Members hold (words, transformers reads it, vLLM reads it, what to take instead).
    """

    ALIKE = ("4 or 8 bits without zero points, FP8", True, True, "")
    ZERO_POINTS = ("4 or 8 bits with zero points, alike in all layers", True, True, "")
    FLOATS = ("MXFP4 and NVFP4", True, True, "")
    SEVERAL = (
        "zero points in layers of several bits or group sizes",
        False, True, "--symmetric, or a --group-size that divides every width",
    )  # fmt: skip
    EXPERTS = ("experts with zero points", False, False, "--symmetric")
    STACKED = (
        "experts that the model itself stores in one tensor",
        False, False, "the 16-bit model",
    )  # fmt: skip
    UNLIKE = (
        "query, key and value, or gate and up, of different bits",
        True, False, "a run without --mixed",
    )  # fmt: skip
    THREE_BITS = ("3 bits", True, False, "--bits 4")
    HEAD = ("a quantized head beside an embedding of its own", True, False, "--head 16")
    EMBEDDING = (
        "a quantized embedding, which is the head too if they are tied",
        False, False, "--embedding 16 and --head 16",
    )  # fmt: skip

    @property
    def words(self) -> str:
        return self.value[0]

    @property
    def in_transformers(self) -> bool:
        return self.value[1]

    @property
    def in_vllm(self) -> bool:
        return self.value[2]

    @property
    def note(self) -> str:
        """Say who does not read it, and what they read."""
        unable = ["transformers"] * (not self.in_transformers) + ["vLLM"] * (not self.in_vllm)
        if not unable:
            return ""
        does = "do" if len(unable) == 2 else "does"
        return (
            f"{' and '.join(unable)} {does} not read {self.words}; for"
            f" {'them' if len(unable) == 2 else 'it'} take {self.value[3]}"
        )


def forms_of(
    source: ModelSource,
    slots: Sequence[TensorSlot],
    schemes: Mapping[str, LinearScheme | None],
) -> list[Form]:
    """List the forms that a folder of compressed-tensors has.

    Args:
        schemes: of the quantized tensors, by name.
    """
    quantized = {slot: schemes[slot.name] for slot in slots if schemes.get(slot.name) is not None}
    integers = [scheme for scheme in quantized.values() if isinstance(scheme, WeightScheme)]
    has_zero_points = any(not scheme.symmetric for scheme in integers)
    expert_slots = [slot for slot in quantized if slot.expert is not None]
    roles = {slot.role for slot in quantized}
    found = {
        Form.ALIKE: not has_zero_points,
        Form.ZERO_POINTS: has_zero_points,
        Form.FLOATS: any(isinstance(scheme, Fp4Scheme) for scheme in quantized.values()),
        Form.THREE_BITS: any(scheme.bits == 3 for scheme in integers),
        Form.EMBEDDING: Role.EMBEDDING in roles,
        Form.HEAD: Role.HEAD in roles,
        Form.STACKED: bool(expert_slots) and _stores_stacks(source),
        Form.EXPERTS: bool(expert_slots) and has_zero_points,
        Form.SEVERAL: has_zero_points and len(set(quantized.values())) > 1,
        Form.UNLIKE: _are_unlike(slots, schemes),
    }
    return [form for form, is_there in found.items() if is_there]


def _are_unlike(slots: Sequence[TensorSlot], schemes: Mapping[str, LinearScheme | None]) -> bool:
    """Return True if linears that vLLM computes as one have different schemes."""
    fused = defaultdict(set)
    for slot in slots:
        part = _FUSED.get(slot.role)
        if part is not None and slot.is_linear:
            fused[slot.layer, slot.expert, part].add(schemes.get(slot.name))
    return any(len(each) > 1 for each in fused.values())


def _stores_stacks(source: ModelSource) -> bool:
    """Return True if the model's own class holds all experts of a layer in one tensor."""
    names = source.family.names.experts
    is_cut = isinstance(source.weights, SeparatedExperts)
    return is_cut or names.transposed or names.stacked_gate_up.endswith(".weight")


def readers_of(source: ModelSource) -> tuple[str, ...]:
    """List the programs that can read the model, one line each."""
    if source.path.is_file():
        return (OURS, "llama.cpp and what is built on it")
    config = source.config.get("quantization_config")
    if not isinstance(config, dict):
        return (OURS, "transformers", "vLLM", "SGLang")
    match config.get("quant_method"):
        case "compressed-tensors":
            return (OURS, *_compressed_tensors(source, config))
        case "gptq":
            return (OURS, "vLLM", "SGLang", "TGI", "transformers with gptqmodel")
        case "awq":
            return (OURS, "vLLM", "SGLang", "TGI", "transformers with gptqmodel")
        case "exl3":
            return (OURS, "ExLlamaV3", "TabbyAPI")
        case "fp8":
            return (OURS, "vLLM", "SGLang", "transformers on a GPU of capability 8.9 or later")
    return (OURS,)


def _compressed_tensors(source: ModelSource, config: dict[str, Any]) -> tuple[str, ...]:
    try:
        by_target = _by_target(config)
    except UnsupportedModelError:
        return ()
    slots = source.slots()
    forms = forms_of(source, slots, _schemes_of(source, slots, by_target))
    in_vllm = all(form.in_vllm for form in forms)
    in_transformers = all(form.in_transformers for form in forms)
    return (
        *(("vLLM", "SGLang") if in_vllm else ()),
        *(("transformers with compressed-tensors",) if in_transformers else ()),
    )


def _by_target(config: dict[str, Any]) -> dict[str, LinearScheme]:
    """Return the scheme of each target, a module or a kind of modules."""
    found: dict[str, LinearScheme] = {}
    for name, group in config.get("config_groups", {}).items():
        for scheme in declared_weights(config | {"config_groups": {name: group}}).schemes:
            found |= dict.fromkeys(group.get("targets") or (), scheme)
    return found


def _schemes_of(
    source: ModelSource, slots: Sequence[TensorSlot], by_target: dict[str, LinearScheme]
) -> dict[str, LinearScheme | None]:
    """Return the schemes of a result's quantized tensors, by name."""
    usual = by_target.get("Linear", next(iter(by_target.values()), None))
    weights = source.weights
    return {
        slot.name: by_target.get(slot.name.removesuffix(".weight"), usual)
        for slot in slots
        if weights.packed_bits(slot.name) is not None or weights.float_bits(slot.name) is not None
    }
