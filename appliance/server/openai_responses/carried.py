"""Carries thoughts as `encrypted_content`, which stateless clients send back unchanged.

Hides nothing: the answer has the thought as text too, which some clients drop.
"""

from __future__ import annotations

import base64
import binascii

from appliance.errors import RequestError

_MARK = "appliance-1:"


def carried(thought: str) -> str:
    return _MARK + base64.b64encode(thought.encode()).decode()


def thought_of(content: str, where: str) -> str:
    """Decode a thought from `carried`.

    Args:
        content: the client's text.
        where: its place in the body.

    Raises:
        RequestError: another server encoded it.
    """
    try:
        if content.startswith(_MARK):
            return base64.b64decode(content.removeprefix(_MARK), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        pass
    raise RequestError(
        f"{where}.encrypted_content was not made by this server; leave the item out",
        param="input",
        code="invalid_encrypted_content",
    )
