"""The setuptools commands that put the CPU library into the package, named in pyproject.toml.

Loaded by path while the package is being built, when nothing of ours can be imported.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

if TYPE_CHECKING:
    from setuptools import Extension

_build = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("build.py"))))


class BuildLibrary(build_ext):
    """Compiles the library; without a compiler it says so and leaves the library out."""

    def get_ext_filename(self, fullname: str) -> str:
        """Leave out the tag of a Python version: ctypes loads the library."""
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        """Build into the wheel, or into the checkout for an editable install."""
        out = _build.LIBRARY if self.editable_mode else Path(self.get_ext_fullpath(ext.name))
        try:
            _build.build_if_changed(out)
        except _build.BuildError as error:
            self.warn(str(error))

    def copy_extensions_to_source(self) -> None:
        """Copy nothing: an editable install builds the library in place."""


class PlatformWheel(bdist_wheel):
    """A wheel for one platform and any Python 3: the library does not use Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of Python, ABI and platform."""
        return "py3", "none", super().get_tag()[2]
