"""A hub's name of a model: `org/name`, with `@revision`, `:FILE.gguf`, or both."""

from __future__ import annotations

import re
from dataclasses import dataclass

from appliance.model_files.gguf_names import is_gguf

_FORM = re.compile(
    r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>(?!.*\.\.)\w[\w./-]*))?(?::(?P<file>[^:\\]+\.(?i:gguf)))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class HubName:
    """A model of a hub.

    Attributes:
        repo: `org/name`.
        revision: branch, tag or commit; None for the main branch.
        file: one of its GGUF files, which may be a part of one model; None for the safetensors
            folder or the only GGUF model.
    """

    repo: str
    revision: str | None = None
    file: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """Parse a name; None if it is not a hub's."""
        match = _FORM.fullmatch(text)
        if match is None or is_gguf(match["repo"]):
            return None
        return cls(match["repo"], match["revision"], match["file"])

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        return f"{self.repo}{revision}" + ("" if self.file is None else f":{self.file}")
