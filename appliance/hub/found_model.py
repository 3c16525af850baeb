"""Finds a model, its adapters and its draft model or head; fetches missing ones.

Vocabularies are compared here, because the engine has no tokenizer. Heads have none either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from appliance.config import SELF_DRAFT, cache_dir
from appliance.errors import ConfigError
from appliance.hub import ResolvedModel, resolve_adapters, resolve_model
from appliance.hub.growth import ignore_progress

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from appliance.config import EngineConfig
    from appliance.tokenizer import Tokenizer


def find_model_of(
    engine: EngineConfig, progress: Callable[[str, int, int], None] = ignore_progress
) -> tuple[ResolvedModel, EngineConfig]:
    """Find the model; return the settings with local paths of adapters and draft model.

    Args:
        progress: called with stage, done, total.

    Raises:
        ApplianceError: a file is missing or cannot be fetched, or the models do not fit together.
    """
    images = engine.images and not engine.mmproj
    drafts = engine.speculate in ("auto", "mtp")
    found = resolve_model(
        engine.model, cache_dir=cache_dir(), progress=progress, images=images, drafts=drafts
    )
    adapters = resolve_adapters(engine.lora, progress=progress)
    engine = msgspec.structs.replace(engine, lora=adapters)
    return found, resolve_draft(engine, found.path, progress=progress)


def resolve_draft(
    engine: EngineConfig, model: Path, *, progress: Callable[[str, int, int], None]
) -> EngineConfig:
    """Replace the draft's name in the settings by its local path.

    Args:
        model: folder or file of the served model.
        progress: called with stage, bytes downloaded and total.

    Raises:
        ConfigError: the draft model's vocabulary differs.
        ModelError: the draft model is missing or cannot be fetched.
    """
    name = engine.draft_model or engine.eagle_head
    if name in ("", SELF_DRAFT):
        return engine
    from appliance.tokenizer import Tokenizer  # most models have no draft model

    path = resolve_model(name, cache_dir=cache_dir(), progress=progress).path
    if engine.eagle_head:
        return msgspec.structs.replace(engine, speculate=f"eagle={path}")
    _compare(name, Tokenizer.from_path(path), Tokenizer.from_path(model))
    return msgspec.structs.replace(engine, speculate=f"draft={path}")


def _compare(name: str, draft: Tokenizer, served: Tokenizer) -> None:
    """Refuse a draft model with a different token at some id; extra ids at the end are fine."""
    (drafted, _), (tokens, _) = draft.vocabulary(), served.vocabulary()
    pairs = zip(drafted, tokens, strict=False)
    for token_id, (own, other) in enumerate(pairs):
        if own != other:
            raise ConfigError(
                f"--speculate draft={name}: its token {token_id:,} is {_shown(own)}, and the"
                f" model's is {_shown(other)}; a draft model needs the same vocabulary, so take a"
                " smaller one of the same family"
            )


def _shown(token: bytes) -> str:
    return repr(token.decode(errors="replace"))
