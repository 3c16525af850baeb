"""Example commands that a server prints for the user to paste into a terminal."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from appliance.sampling_defaults import SamplingDefaults

_NAME = "appliance"


def own_command() -> str:
    """Return the command of this program, valid in any folder.

    It is the bare name only if that is on every terminal's PATH: an activated environment is not
    active in the next terminal.
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


def try_it(url: str, name: str, sampling: SamplingDefaults, *, chats: bool, keyed: bool) -> str:
    """Format a curl request that the model can answer.

    Args:
        chats: the model has a chat template; others continue a text.
        keyed: the server needs a key, taken from the environment.
    """
    body: dict[str, Any] = {"model": name}
    if "temperature" not in sampling.values:
        body["temperature"] = 0.7
    if chats:
        body |= {"max_tokens": 200, "messages": [{"role": "user", "content": "Hello!"}]}
    else:
        body |= {"max_tokens": 60, "prompt": "Once upon a time"}
    path = "v1/chat/completions" if chats else "v1/completions"
    words = [
        *("curl", shlex.quote(f"{url}/{path}")),
        *(["-H", '"Authorization: Bearer $APPLIANCE_API_KEY"'] if keyed else []),
        *("-H", "'Content-Type: application/json'"),
        *("-d", shlex.quote(json.dumps(body, ensure_ascii=False))),
    ]
    return " ".join(words)
