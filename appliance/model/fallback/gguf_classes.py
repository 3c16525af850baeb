"""GGUF files whose models transformers' modules run: their settings and tensors as a folder's.

Files are read as llama.cpp's converter writes them. Sources: llama.cpp's conversion/*.py and
src/models/*.cpp, and transformers' classes.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.errors import CheckpointError
from appliance.kernels import arrays
from appliance.kernels.weights.weight import dense
from appliance.model.families.gguf_config import (
    gguf_biases,
    gguf_config,
    gguf_layer_types,
    gguf_mamba2,
    num_layers,
    of_layers,
)
from appliance.model.families.limits import short
from appliance.model.gguf_tensors import FREQUENCY_DIVISORS, is_unused
from appliance.model.gguf_weights import GGUFReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor

    from appliance.gguf import GGUFFile
    from appliance.kernels.weights.weight import Weight
    from appliance.model.families.reader import ConfigReader
    from appliance.model.tensors import TensorSlot


_STORED = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>.+?)(?P<kind>\.weight|\.bias)?")
_FILE_ENDS = (".weight", ".bias")
_LARGEST = 1e6  # of numbers among settings
_LAYER = "model.layers.{layer}."
_ENDS = {"token_embd": "model.embed_tokens", "output": "lm_head"}
_ATTENTION = {
    "blk.attn_q": _LAYER + "self_attn.q_proj",
    "blk.attn_k": _LAYER + "self_attn.k_proj",
    "blk.attn_v": _LAYER + "self_attn.v_proj",
    "blk.attn_output": _LAYER + "self_attn.o_proj",
    "blk.attn_q_norm": _LAYER + "self_attn.q_norm",
    "blk.attn_k_norm": _LAYER + "self_attn.k_norm",
}


@dataclass(frozen=True, slots=True)
class GGUFClass:
    """The files of one label, and the class of transformers that runs them.

    Attributes:
        config: reads the settings beside those that all labels share.
        names: modules of a checkpoint by those of a file, in which `blk.` stands for any layer. The
            ending `.weight` or `.bias` is the same. `{layer}` is the layer, `{part}` the number of
            one of the matrices that the file stacks.
        whole: the same with full names, where the ending differs.
        changes: make a checkpoint's tensor of a file's, by the file's full name.
        numbers: full names of a checkpoint's tensors that the file has among its settings, a number
            per layer, with their shapes.
    """

    architecture: str
    model_type: str
    config: Callable[[ConfigReader, GGUFFile], dict[str, Any]]
    names: Mapping[str, str]
    whole: Mapping[str, str] = field(default_factory=dict)
    changes: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    numbers: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)

    def settings(self, file: GGUFFile, label: str) -> dict[str, Any]:
        """Return the Hugging Face config; raise as `gguf_config` does."""
        found = gguf_config(file, label, self.config)
        return found | {"architectures": [self.architecture], "model_type": self.model_type}

    def places(self, file: GGUFFile, layers: int) -> dict[str, GGUFPlace]:
        """Return where the tensors of a checkpoint are in a file, by their names in it."""
        found: dict[str, GGUFPlace] = {}
        for stored in file.tensor_names():
            own, layer, key = self._own(stored)
            if own is None:
                continue
            change = self.changes.get(key)
            if "{part}" in own:
                for part in range(file.shape(stored)[0]):
                    found[own.format(layer=layer, part=part)] = GGUFPlace(stored, part)
            else:
                found[own.format(layer=layer)] = GGUFPlace(stored, change=change)
        for setting, (pattern, shape) in self.numbers.items():
            for index, number in enumerate(_per_layer(file, setting, layers)):
                value = np.full(shape, number, np.float32)
                found[pattern.format(layer=index)] = GGUFPlace(
                    setting, value=arrays.of_numpy(value)
                )
        return found

    def _own(self, stored: str) -> tuple[str | None, str | None, str]:
        """Return the pattern of a stored tensor's name in a checkpoint, its layer, and its key."""
        place = _STORED.fullmatch(stored)
        assert place is not None
        stem = f"blk.{place['part']}" if place["layer"] else place["part"]
        key = stem + (place["kind"] or "")
        own = self.names.get(stem)
        if own is not None:
            own += place["kind"] or ".weight"
        return self.whole.get(key, own), place["layer"], key

    def stored_name(self, name: str) -> str:
        """Return what a file calls a checkpoint's tensor."""
        of_modules = (
            (own + end, key + end) for key, own in self.names.items() for end in _FILE_ENDS
        )
        of_numbers = ((own, key) for key, (own, _) in self.numbers.items())
        for own, key in (
            *of_modules,
            *((own, key) for key, own in self.whole.items()),
            *of_numbers,
        ):
            pattern = re.escape(own).replace(r"\{layer\}", r"(\d+)").replace(r"\{part\}", r"\d+")
            if (found := re.fullmatch(pattern, name)) is not None:
                return key.replace("blk.", f"blk.{found[1]}.", 1) if "blk." in key else key
        return name


@dataclass(frozen=True, slots=True)
class GGUFPlace:
    """A tensor of a checkpoint in a file.

    Attributes:
        stored: the file's tensor, or its setting.
        part: number of its matrix in a stack.
        value: of a tensor that is a setting.
    """

    stored: str
    part: int | None = None
    change: Callable[[Tensor], Tensor] | None = None
    value: Tensor | None = None


class WeightsOfClass(GGUFReader):
    """A file's tensors under the names of transformers' modules; quantized ones keep their codes.

    Args:
        places: of all tensors, by those names.
        slots: tensors that the modules read.
    """

    def __init__(
        self,
        file: GGUFFile,
        of: GGUFClass,
        places: Mapping[str, GGUFPlace],
        slots: Iterable[TensorSlot],
    ) -> None:
        super().__init__(file)
        self._of = of
        self._places = places
        self._slots = {slot.name for slot in slots}

    def tensor_names(self) -> list[str]:
        return list(self._places)

    def usual_name(self, name: str) -> str:
        return self._of.stored_name(name)

    def unplaced(self) -> list[str]:
        held = {place.stored for name, place in self._places.items() if name in self._slots}
        left = (name for name in self._file.tensor_names() if name not in held)
        return sorted(n for n in left if not is_unused(n) and n != FREQUENCY_DIVISORS)

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._places[name]
        if place.value is not None:
            return tuple(place.value.shape)
        shape = tuple(self._file.shape(place.stored))
        if place.part is not None:
            return shape[1:]
        return shape if place.change is None else self._changed_shape(place, shape)

    def _changed_shape(self, place: GGUFPlace, shape: tuple[int, ...]) -> tuple[int, ...]:
        assert place.change is not None
        return tuple(
            place.change(arrays.in_torch(arrays.of_numpy(np.ones(shape, np.float32)))).shape
        )

    def _matrix(self, name: str) -> str | None:
        place = self._places[name]
        is_stored = place.change is None and place.value is None
        return place.stored if is_stored and len(self.shape(name)) == 2 else None

    def load_rows(self, name: str, start: int, stop: int) -> Weight:
        place = self._places[name]
        if place.value is not None:
            value: Tensor = arrays.in_torch(place.value)
            return value
        if place.change is None:
            return self._file.load_rows(place.stored, start, stop, part=place.part)
        whole = arrays.in_torch(dense(self._file.load(place.stored), "float32"))
        return place.change(whole)[start:stop]


def _per_layer(file: GGUFFile, setting: str, layers: int) -> list[float]:
    """Read a setting without an architecture's prefix, of all layers or each."""
    value = file.metadata.get(setting)
    listed = value if isinstance(value, list) else [value] * layers
    numbers = [float(n) for n in listed if isinstance(n, int | float) and abs(n) < _LARGEST]
    if len(numbers) != len(listed) or len(numbers) != layers:
        raise CheckpointError(
            f"{file.path}: {setting} is {short(value)}, but must be {layers} numbers, one for each"
            " layer; use another file of the model"
        )
    return numbers


def _mlp(module: str) -> dict[str, str]:
    return {f"blk.ffn_{part}": f"{_LAYER}{module}.{part}_proj" for part in ("gate", "up", "down")}


def _stored_shape(file: GGUFFile, name: str) -> tuple[int, ...]:
    if name not in file.tensor_names():
        raise CheckpointError(f"{file.path} has no {name}; use another file of the model")
    return file.shape(name)


# --- Gemma 3n: several streams (AltUp), learned residuals (LAuReL), inputs of each layer ---------

_OWN_KV_LAYERS = 20  # of both models that there are


def _gemma3n(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    layers = num_layers(meta)
    widths = of_layers(meta, "feed_forward_length")
    scales = meta.numbers("activation_sparsity_scale", layers)
    bases = {
        "full_attention": meta.number("rope.freq_base", 1e6),
        "sliding_attention": meta.number("rope.freq_base_swa", 1e4),
    }
    return {
        "intermediate_size": list(widths) * (layers if len(widths) == 1 else 1),
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": meta.integer("attention.sliding_window"),
        "layer_types": gguf_layer_types(meta, 5),
        "num_kv_shared_layers": meta.integer(
            "attention.shared_kv_layers", max(0, layers - _OWN_KV_LAYERS)
        ),
        "final_logit_softcapping": meta.number("final_logit_softcapping", 30.0),
        "altup_active_idx": meta.integer("altup.active_idx", 0),
        "altup_num_inputs": meta.integer("altup.num_inputs"),
        "hidden_size_per_layer_input": meta.integer("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": _stored_shape(file, "per_layer_token_embd.weight")[0],
        "laurel_rank": _stored_shape(file, "blk.0.laurel_l.weight")[0],
        # Kept as quantiles of the normal distribution, which class and converter compute.
        "activation_sparsity_pattern": [round(NormalDist().cdf(scale), 6) for scale in scales],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in bases.items()
        },
    }


GEMMA3N = GGUFClass(
    architecture="Gemma3nForCausalLM",
    model_type="gemma3n_text",
    config=_gemma3n,
    names=_ENDS
    | _ATTENTION
    | _mlp("mlp")
    | {
        "output_norm": "model.norm",
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
        "altup_proj": "model.altup_projections.{part}",
        "altup_unembd_proj": "model.altup_unembed_projections.{part}",
        "blk.attn_norm": _LAYER + "input_layernorm",
        "blk.post_attention_norm": _LAYER + "post_attention_layernorm",
        "blk.ffn_norm": _LAYER + "pre_feedforward_layernorm",
        "blk.post_ffw_norm": _LAYER + "post_feedforward_layernorm",
        "blk.altup_correct_coef": _LAYER + "altup.correction_coefs",
        "blk.altup_predict_coef": _LAYER + "altup.prediction_coefs",
        "blk.altup_router": _LAYER + "altup.modality_router",
        "blk.altup_router_norm": _LAYER + "altup.router_norm",
        "blk.laurel_l": _LAYER + "laurel.linear_left",
        "blk.laurel_r": _LAYER + "laurel.linear_right",
        "blk.laurel_post_norm": _LAYER + "laurel.post_laurel_norm",
        "blk.inp_gate": _LAYER + "per_layer_input_gate",
        "blk.proj": _LAYER + "per_layer_projection",
        "blk.post_norm": _LAYER + "post_per_layer_input_norm",
    },
    whole={"blk.altup_correct_scale.weight": _LAYER + "altup.correct_output_scale"},
)


# --- Falcon H1: attention and Mamba-2 side by side; its multipliers are in the file's weights -----


def _falcon_h1(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    mamba, names = gguf_mamba2(meta, file, 0), file.tensor_names()
    ones = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
    return {
        "hidden_act": "silu",
        **gguf_biases(file, attention="attention_bias", mlp="mlp_bias"),
        "mamba_d_ssm": meta.integer("ssm.inner_size"),
        "mamba_n_heads": mamba["heads"],
        "mamba_d_head": mamba["head_dim"],
        "mamba_n_groups": mamba["groups"],
        "mamba_d_state": mamba["state"],
        "mamba_d_conv": mamba["taps"],
        "mamba_conv_bias": mamba["filter_bias"],
        "mamba_proj_bias": mamba["bias"],
        "projectors_bias": "blk.0.ssm_out.bias" in names,
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in names,
        "mamba_norm_before_gate": False,
        "ssm_multipliers": [1.0] * 5,
        "mlp_multipliers": [1.0] * 2,
        **{f"{name}_multiplier": 1.0 for name in ones},
    }


def _rates(tensor: Tensor) -> Tensor:
    return (-tensor).log().flatten()


def _vector(tensor: Tensor) -> Tensor:
    return tensor.flatten()


def _filter(tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(1)


FALCON_H1 = GGUFClass(
    architecture="FalconH1ForCausalLM",
    model_type="falcon_h1",
    config=_falcon_h1,
    names=_ENDS
    | _ATTENTION
    | _mlp("feed_forward")
    | {
        "output_norm": "model.final_layernorm",
        "blk.attn_norm": _LAYER + "input_layernorm",
        "blk.ffn_norm": _LAYER + "pre_ff_layernorm",
        "blk.ssm_in": _LAYER + "mamba.in_proj",
        "blk.ssm_conv1d": _LAYER + "mamba.conv1d",
        "blk.ssm_norm": _LAYER + "mamba.norm",
        "blk.ssm_out": _LAYER + "mamba.out_proj",
    },
    whole={
        "blk.ssm_dt.bias": _LAYER + "mamba.dt_bias",
        "blk.ssm_a": _LAYER + "mamba.A_log",
        "blk.ssm_d": _LAYER + "mamba.D",
    },
    changes={
        "blk.ssm_a": _rates,
        "blk.ssm_d": _vector,
        "blk.ssm_norm.weight": _vector,
        "blk.ssm_conv1d.weight": _filter,
    },
)


# --- Apertus: an activation with numbers of its own (xIELU), which are among the settings ---------

_XIELU = _LAYER + "mlp.act_fn."


def _apertus(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    return {
        "hidden_act": "xielu",
        **gguf_biases(file, attention="attention_bias"),
        "rope_scaling": None,
        "rope_parameters": _llama3(meta, file),
    }


def _llama3(meta: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    """Return the settings of Llama 3.1's scaling of rotary frequencies, from what divides them."""
    theta = meta.number("rope.freq_base", 10000.0)
    if FREQUENCY_DIVISORS not in file.tensor_names():
        return {"rope_type": "default", "rope_theta": theta}
    divisors: list[float] = file.load(FREQUENCY_DIVISORS).tolist()  # type: ignore[union-attr]
    found = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": max(divisors),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    usual = (_divisor(found, theta ** (-pair / len(divisors))) for pair in range(len(divisors)))
    if not all(map(lambda a, b: math.isclose(a, b, rel_tol=1e-3), usual, divisors)):
        raise CheckpointError(
            f"{file.path}: {FREQUENCY_DIVISORS} is not as Llama 3.1's scaling by"
            f" {max(divisors):g} has it; serve the folder that the file was made from"
        )
    return found


def _divisor(scaling: dict[str, Any], frequency: float) -> float:
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high, factor = (scaling[key] for key in ("low_freq_factor", "high_freq_factor", "factor"))
    share = min(1.0, max(0.0, (turns - low) / (high - low)))
    return float(1 / ((1 - share) / factor + share))


APERTUS = GGUFClass(
    architecture="ApertusForCausalLM",
    model_type="apertus",
    config=_apertus,
    names=_ENDS
    | _ATTENTION
    | _mlp("mlp")
    | {
        "output_norm": "model.norm",
        "blk.attn_norm": _LAYER + "attention_layernorm",
        "blk.ffn_norm": _LAYER + "feedforward_layernorm",
    },
    numbers={
        "xielu.alpha_p": (_XIELU + "alpha_p", (1,)),
        "xielu.alpha_n": (_XIELU + "alpha_n", (1,)),
        "xielu.beta": (_XIELU + "beta", ()),
        "xielu.eps": (_XIELU + "eps", ()),
    },
)

# By the label of their files, `general.architecture`.
GGUF_CLASSES = {"gemma3n": GEMMA3N, "falcon-h1": FALCON_H1, "apertus": APERTUS}
