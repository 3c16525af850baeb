"""Compares nodes: all need the same version of the appliance and the same weights.

Imports no Ray, so it can run on a node before anything else.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from appliance.config import SELF_DRAFT
from appliance.config.values import named_paths
from appliance.engine.served_model import weights_digest
from appliance.errors import ApplianceError, ConfigError
from appliance.hub.found_model import find_model_of
from appliance.model_files.files_beside import find_projector
from appliance.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

    from appliance.config import EngineConfig


class NodeFacts(msgspec.Struct, frozen=True):
    """The facts on which nodes must agree.

    Attributes:
        weights: digest of the files of the model, its adapters, its draft model and what reads its
            pictures.
        problem: why the node cannot use them; empty if it can.
    """

    version: str
    weights: str = ""
    problem: str = ""


def look(engine: EngineConfig) -> NodeFacts:
    """Find a model's files on this node, download missing ones, and digest them."""
    try:
        model, engine = find_model_of(engine)
        paths = [model.path, *map(Path, named_paths(engine.lora, "lora").values())]
        if engine.draft_model not in ("", SELF_DRAFT):
            paths.append(Path(engine.draft_model))
        projector = find_projector(model.path, engine.mmproj) if engine.images else None
        paths += [] if projector is None else [projector]
        digests = " ".join(weights_digest(path).hex() for path in paths)
    except (ApplianceError, OSError) as error:
        return NodeFacts(__version__, problem=str(error))
    return NodeFacts(__version__, digests)


def agreed(facts: Mapping[str, NodeFacts]) -> NodeFacts:
    """Return the facts that all nodes share.

    Args:
        facts: by the node's address.

    Raises:
        ConfigError: two nodes differ, or one cannot use the model.
    """
    for address, one in facts.items():
        if one.problem:
            raise ConfigError(f"node {address} cannot serve the model: {one.problem}")
    for what, fix in (
        ("version", "install the same version of the appliance on all nodes"),
        ("weights", "give all nodes the same files of the model"),
    ):
        counts = Counter(getattr(one, what) for one in facts.values())
        if len(counts) > 1:
            usual, _ = counts.most_common(1)[0]
            others = [
                f"{address} has {getattr(one, what)}"
                for address, one in facts.items()
                if getattr(one, what) != usual
            ]
            raise ConfigError(
                f"the nodes have different {what}{'s' if what == 'version' else ''}: most have"
                f" {usual}, {', '.join(others)}; {fix}"
            )
    return next(iter(facts.values()))


def check(expected: NodeFacts, found: NodeFacts) -> None:
    """Raise ConfigError if a node that joined later differs from the first ones."""
    agreed({"of the first replicas": expected, "of this replica": found})
