"""Reads a model's settings with their types and remembers which were read.

A setting that changes the arithmetic is either read by a family or refused by name. Numbers must be
in their range in `limits`. Knows no family.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from appliance.errors import UnsupportedModelError
from appliance.model.families.limits import RANGES, in_words, short, wrong

if TYPE_CHECKING:
    from collections.abc import Mapping

# Settings of Hugging Face configs that change a decoder's arithmetic, with neutral values. None is
# always neutral; a list is neutral if all of its elements are.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "alibi": (False,),
    "attention_bias": (False,),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "is_encoder_decoder": (False,),
    "layer_types": ("full_attention",),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "mlp_bias": (False,),
    "n_routed_experts": (0,),
    "no_rope_layers": (1,),  # 1 means the layer has RoPE
    "num_experts": (0,),
    "num_local_experts": (0, 1),
    "partial_rotary_factor": (1,),
    "qk_layernorm": (False,),
    "qkv_bias": (False,),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "sliding_window": (0,),
    "use_bidirectional_attention": (False,),
    "use_parallel_residual": (False,),
    "use_qk_norm": (False,),
    "use_sliding_window": (False,),
}

# Settings of experts and routers, and those of them that only training or kernels read.
_ROUTING = re.compile(r"expert|router|routed|routing|moe_|top_?k")
_HARMLESS_ROUTING = frozenset(
    {
        "expert_parallel_size", "experts_implementation", "experts_per_token",
        "moe_aux_loss_coeff", "moe_intermediate_size", "moe_layer_freq",
        "moe_shared_expert_overlap",
        "num_local_experts", "output_router_logits", "router_aux_loss_coef",
        "router_dtype", "router_jitter_noise", "router_z_loss_coef", "top_k",
    }
)  # fmt: skip


class ConfigReader:
    """Settings by name, type-checked when read; `null` counts as absent.

    Args:
        origin: their file, for messages.
    """

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self.origin = origin
        self._values = values
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def value(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        value = self._values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        value, usual = self.value(key, default), RANGES[key]
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value not in usual:
            raise wrong(self.origin, key, value, f"a whole number {in_words(usual)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value, usual = self.value(key, default), RANGES[key]
        if isinstance(value, bool) or value not in usual:
            raise wrong(self.origin, key, value, f"a number {in_words(usual)}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.value(key) is None else self.number(key)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.value(key, default)
        if not isinstance(value, bool):
            raise wrong(self.origin, key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.value(key, default)
        if not isinstance(value, str):
            raise wrong(self.origin, key, value, "a string")
        return value

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        value, usual = self.value(key), RANGES[key]
        fits = isinstance(value, list) and len(value) == length
        if not fits or any(isinstance(item, bool) or item not in usual for item in value):
            raise wrong(self.origin, key, value, f"a list of {length} numbers {in_words(usual)}")
        return tuple(float(item) for item in value)

    def integers(self, key: str, length: int) -> tuple[int, ...]:
        """Read a list of whole numbers, each 0 or in the range of `key`."""
        value, usual = self.value(key), RANGES[key]
        fits = isinstance(value, list) and len(value) == length
        if not fits or any(type(n) is not int or (n and n not in usual) for n in value):
            raise wrong(self.origin, key, value, f"a list of {length} whole numbers")
        return tuple(value)

    def section(self, key: str) -> ConfigReader:
        """Read the settings nested under a key; empty if it is absent."""
        value = self.value(key, {})
        if not isinstance(value, dict):
            raise wrong(self.origin, key, value, "an object")
        return ConfigReader(value, f"{self.origin}: {key}")

    def without(self, key: str) -> ConfigReader:
        """Return the settings without one, remembering what was read."""
        left = {name: value for name, value in self._values.items() if name != key}
        reader = ConfigReader(left, self.origin)
        reader._read |= self._read
        return reader

    def refuse(self, key: str, supported: str) -> UnsupportedModelError:
        """Build the error for an unsupported value."""
        return UnsupportedModelError(
            f"{self.origin}: {key} = {short(self._values.get(key))} is not supported; "
            f"supported is {supported}"
        )

    def refuse_unread(self, neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL_VALUES) -> None:
        """Refuse an unread setting of `neutral` with another value."""
        for key, usual in neutral.items():
            value = self._values.get(key)
            items = value if isinstance(value, list) else [value]
            if key not in self._read and any(i is not None and i not in usual for i in items):
                raise self.refuse(key, f"{usual[0]!r}" if usual else "only a model without it")

    def refuse_unknown_routing(self) -> None:
        """Refuse an unread setting whose name suggests that it changes routing."""
        for key in sorted(self._values.keys() - self._read - _HARMLESS_ROUTING):
            value = self._values[key]
            is_set = value not in (None, False, 0, [], {})
            if is_set and _ROUTING.search(key) and not key.endswith("_types"):
                raise self.refuse(key, "only a model without it")

    def refuse_unknown(self, harmless: frozenset[str]) -> None:
        """Refuse an unread setting that is not known to be harmless."""
        for key in sorted(self._values.keys() - self._read - harmless):
            if self._values[key] is not None:
                raise self.refuse(key, "only a model without it")
