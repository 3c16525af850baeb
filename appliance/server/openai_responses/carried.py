"""Thoughts as `encrypted_content`, which clients that keep the conversation send back as it is.

It is no secret here: the same thought stands beside it as text, which some clients do not keep.
"""

from __future__ import annotations

import base64
import binascii

from appliance.errors import RequestError

_MARK = "appliance-1:"


def carried(thought: str) -> str:
    """A thought in a form that nobody else understands."""
    return _MARK + base64.b64encode(thought.encode()).decode()


def thought_of(content: str, where: str) -> str:
    """The thought that `carried` was given.

    Args:
        content: of a client.
        where: it stands.

    Raises:
        RequestError: it is from elsewhere.
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
