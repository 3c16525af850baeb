"""The tower families."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.errors import UnsupportedModelError
from appliance.model.vision.families.gemma4 import GEMMA4, GEMMA4_UNIFIED
from appliance.model.vision.families.glm4v import GLM4V
from appliance.model.vision.families.internvl import INTERNVL
from appliance.model.vision.families.pixtral import MISTRAL3
from appliance.model.vision.families.qwen2_vl import QWEN2_5_VL, QWEN2_VL
from appliance.model.vision.families.qwen3_vl import QWEN3_VL
from appliance.model.vision.families.siglip import GEMMA3, IDEFICS3, LFM2_VL, PADDLEOCR_VL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from appliance.model.vision.families.family import ClipMapping, TowerFamily

TOWERS: tuple[TowerFamily, ...] = (
    IDEFICS3,
    LFM2_VL,
    QWEN2_VL,
    QWEN2_5_VL,
    QWEN3_VL,
    MISTRAL3,
    GEMMA3,
    GEMMA4,
    GEMMA4_UNIFIED,
    INTERNVL,
    GLM4V,
    PADDLEOCR_VL,
)
_BY_TYPE = {kind: family for family in TOWERS for kind in family.tower_types}


def tower_family(config: Mapping[str, Any]) -> TowerFamily | None:
    """Find the family of a whole model's tower; None of one without, or of none that is known."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or config.get("vision_config", {}) is None:
        return None
    return _BY_TYPE.get(kind)


_BY_PROJECTOR = {family.clip.projector: family for family in TOWERS if family.clip is not None}
_ALWAYS = frozenset[str]().union(*(f.clip.always for f in TOWERS if f.clip is not None))


def family_of_projector(projector: object) -> tuple[TowerFamily, ClipMapping]:
    """Find the family of a GGUF projector file by its type.

    Raises:
        UnsupportedModelError: it is not known here.
    """
    family = _BY_PROJECTOR.get(projector) if isinstance(projector, str) else None
    if family is None or family.clip is None:
        raise UnsupportedModelError(
            f"the projector file is of type {str(projector)[:40]!r}, which is not read here; read"
            f" are {', '.join(_BY_PROJECTOR)}: serve the model with --no-images"
        )
    return family, family.clip


def has_tower(architecture: str) -> bool:
    """Return True if every text of a GGUF architecture is part of a model with a tower."""
    return architecture in _ALWAYS
