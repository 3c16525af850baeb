"""`python -m appliance`, and the command `appliance`."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.engine.process.launch import LaunchedProcess


def main() -> NoReturn:
    """Run the command line; `serve` starts the engine's process first, so both import at once."""
    with engine_ahead(sys.argv[1:]) as launched:
        from appliance import cli

        cli.main(launched)


def engine_ahead(
    arguments: Sequence[str],
) -> AbstractContextManager[LaunchedProcess | None]:
    """Start the engine's process if these arguments need one; the context ends it."""
    if arguments[:1] != ["serve"] or {"--help", "-h", "--top"} & set(arguments):
        return nullcontext()
    from appliance.engine.process.launch import LaunchedProcess
    from appliance.errors import EngineError

    try:
        return LaunchedProcess()
    except EngineError:
        return nullcontext()  # the command parses again and reports the error


if __name__ == "__main__":
    main()
