"""The facts that must be equal on all nodes of a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.cluster.node_facts import NodeFacts, agreed, check, look
from appliance.config import EngineConfig
from appliance.errors import ConfigError
from appliance.version import __version__

SAME = NodeFacts("1.0", "aa")


def test_equal_nodes_agree() -> None:
    assert agreed({"a": SAME, "b": SAME}) == SAME
    check(SAME, SAME)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (NodeFacts("1.1", "aa"), r"different versions: most have 1\.0, c has 1\.1; install"),
        (NodeFacts("1.0", "bb"), r"different weights: most have aa, c has bb; give all nodes"),
        (NodeFacts("1.0", problem="no such file"), r"node c cannot serve the model: no such file"),
    ],
)
def test_the_one_that_differs_is_named(other: NodeFacts, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        agreed({"a": SAME, "b": SAME, "c": other})
    with pytest.raises(ConfigError):
        check(SAME, other)


def test_weights_are_told_apart_by_their_content(tmp_path: Path) -> None:
    found = []
    for name, content in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.gguf").write_bytes(b"GGUF" + content * 5000)
        found.append(look(EngineConfig(model=str(folder / "model.gguf"))))
    assert found[0] == found[1] != found[2]
    assert found[0].version == __version__


def test_a_model_that_is_not_there_is_a_problem_of_the_node() -> None:
    assert "no-such.gguf" in look(EngineConfig(model="./no-such.gguf")).problem
