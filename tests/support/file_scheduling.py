"""How a parallel run (`pytest -n`) shares the tests out: whole files, as they were collected."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

# What one child process runs, and waits for, in the worker that gets the first of its tests.
ONE_UNIT = PurePosixPath("tests/kernels/executed")


class FileScheduling(LoadScopeScheduling):
    """Gives a worker that is about to run out of tests the next file, or what that child runs."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        assert (config.rootpath / ONE_UNIT).is_dir(), f"{ONE_UNIT} is not there; has it moved?"
        config.option.loadscopereorder = False  # it would begin with the most tests, however quick
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        file = PurePosixPath(nodeid.split("::", 1)[0])
        in_child = file.is_relative_to(ONE_UNIT) and "[interpreter" in nodeid
        return str(ONE_UNIT if in_child else file)
