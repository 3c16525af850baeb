"""The command line's MODEL argument."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[
    str,
    typer.Argument(help="Folder, .gguf file or hub id; without one, the packaged default model."),
]
