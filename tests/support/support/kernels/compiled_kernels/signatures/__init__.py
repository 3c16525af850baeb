"""Shapes of models by name, and how each kernel is compiled for them: a file for each kernel."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.kernels.compiled_kernels.signature import KernelSignature


def signatures(capability: int) -> Iterator[KernelSignature]:
    """Yield all that is compiled and gated for one compute capability (86 is 8.6)."""
    for file in iter_modules(__path__):
        yield from import_module(f"{__name__}.{file.name}").signatures(capability)
