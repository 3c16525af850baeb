"""Reasons for which a model is rightly refused, by its family."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_CODE = "code that comes with a checkpoint"
# model_type -> what the refusal must say.
REFUSALS: dict[str, str] = {
    # Transformers has no class of its own, and code that comes with a checkpoint is never run.
    "baichuan": _CODE,
    "chatglm": _CODE,
    "internvl_chat": _CODE,
    "minicpmv": _CODE,
    "molmo": _CODE,
    "qwen": _CODE,
    # No model of the hub's, but settings of a converter for another program.
    "ONNX": "ONNX",
}


def is_right(config: Mapping[str, Any], reason: str) -> bool:
    """Return True if a refusal says what its family's is for."""
    wanted = REFUSALS.get(str(config.get("model_type")))
    return wanted is not None and re.search(wanted, reason) is not None
