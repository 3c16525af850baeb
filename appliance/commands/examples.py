"""Example commands for users to paste into a terminal."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from appliance.model_files.sampling_defaults import SamplingDefaults

_NAME = "appliance"


def own_command() -> str:
    """Return this program's command, valid in any folder.

    Uses the bare name only if it is on every terminal's PATH: a virtual environment is not active
    in the next terminal.
    """
    script = Path(sys.argv[0])
    if script.name != _NAME:
        return f"{shlex.quote(sys.executable)} -m {_NAME}"
    script = script.absolute()
    found = shutil.which(_NAME)
    if found is not None and script.exists() and script.samefile(found):
        in_environment = sys.prefix != sys.base_prefix
        if not (in_environment and Path(found).is_relative_to(sys.prefix)):
            return _NAME
    return shlex.quote(str(script))


class ExampleRequest(Enum):
    """A first request by kind of model: the path, and the body without the model's name."""

    CHAT = (
        "v1/chat/completions",
        {"max_tokens": 200, "messages": [{"role": "user", "content": "Hello!"}]},
    )
    CONTINUE = ("v1/completions", {"max_tokens": 60, "prompt": "Once upon a time"})
    EMBED = ("v1/embeddings", {"input": ["Bread is made of flour."]})
    RANK = ("v1/rerank", {"query": "What is bread?", "documents": ["A food.", "A bird."]})


def try_it(
    url: str, name: str, sampling: SamplingDefaults, *, use: ExampleRequest, keyed: bool
) -> str:
    """Format a curl request that the model can answer.

    Args:
        use: the kind of model.
        keyed: the server needs a key; takes it from the environment.
    """
    body: dict[str, Any] = {"model": name}
    path, asked = use.value
    if "max_tokens" in asked and "temperature" not in sampling.values:
        body["temperature"] = 0.7
    body |= asked
    words = [
        *("curl", shlex.quote(f"{url}/{path}")),
        *(["-H", '"Authorization: Bearer $APPLIANCE_API_KEY"'] if keyed else []),
        *("-H", "'Content-Type: application/json'"),
        *("-d", shlex.quote(json.dumps(body, ensure_ascii=False))),
    ]
    return " ".join(words)
