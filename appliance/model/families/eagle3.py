"""EAGLE-3 heads: one Llama layer whose attention reads a token and a hidden state side by side.

They draft for another model and predict only its frequent tokens, so the registry leaves them out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.model.families.family import Family
from appliance.model.families.llama import LLAMA

if TYPE_CHECKING:
    from collections.abc import Mapping

    from appliance.model.families.reader import ConfigReader
    from appliance.model.spec import DecoderSpec


def _read(config: ConfigReader) -> DecoderSpec:
    spec = LLAMA.read(config)
    if len(spec.layers) != 1:
        raise config.refuse("num_hidden_layers", "1 with this architecture")
    said = config.integer("draft_vocab_size", spec.vocab_size)
    if said > spec.vocab_size:
        raise config.refuse("draft_vocab_size", f"up to {spec.vocab_size}, the vocab_size")
    layer = replace(spec.layers[0], joins=True)
    return replace(
        spec,
        architecture="eagle3",
        layers=(layer,),
        vocab_size=said,
        read_tokens=spec.vocab_size,
        tied_head=False,
    )


EAGLE3 = Family(
    name="eagle3",
    model_type="llama",
    architectures=("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"),
    read=_read,
)


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Return True for a head's config.

    The authors' configs name Llama, with one setting that only heads have.
    """
    named = config.get("architectures")
    if not isinstance(named, list) or len(named) != 1:
        return False
    of_llama = named[0] in LLAMA.architectures and "draft_vocab_size" in config
    return of_llama or named[0] in EAGLE3.architectures
