"""instructor, in the two ways of asking that the server enforces: by a tool and by a schema.

The third way, any JSON and a schema in the prompt, needs a larger model: see tests/server/agents.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from support.runs.fetched import python_clients

PROGRAM = Path(__file__).parent / "programs" / "instructor_modes.py"
MODES = ("TOOLS", "JSON_SCHEMA")


@pytest.mark.model
def test_each_way_of_asking_is_answered(base_url: str) -> None:
    finished = subprocess.run(
        [python_clients() / "python", PROGRAM, base_url, *MODES],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    answers = json.loads(finished.stdout)
    for mode in MODES:
        assert answers[mode]["given"].keys() == {"city", "inhabitants"}
        assert answers[mode]["given"]["city"]
