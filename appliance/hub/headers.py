"""Fetches the headers of a hub's model for a plan: kilobytes instead of gigabytes.

The files have their full length with holes, so that the usual readers open them.
"""

from __future__ import annotations

import struct
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.errors import CheckpointError, ModelError
from appliance.hub.remote import (
    FOLDERS,
    OLDER_TOKENIZERS,
    SIDE_FILES,
    TIMEOUT,
    choose_files,
    refusal,
)
from appliance.model_files.gguf_names import is_gguf

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.hub.remote import HubName

_FIRST_GUESS = 1 << 20  # bytes of a GGUF file's header, doubled until it suffices
_MOST_HEADER = 100_000_000


def fetch_headers(
    model: HubName,
    folder: Path,
    is_whole: Callable[[Path], object],
    *,
    images: bool = False,
    drafts: bool = False,
) -> Path:
    """Write a model's files without weights.

    Args:
        is_whole: reads a GGUF file's header; raises `CheckpointError` if it is cut off.
        images: also the header of the projector file of a GGUF model.
        drafts: also the header of the file with its draft head.

    Returns:
        The folder, or the GGUF file in it.

    Raises:
        ModelError: the model does not exist, cannot be reached, or has no usable file.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import build_hf_headers, get_session

    repo_id = model.repo

    def fetch(name: str, begin: int, end: int) -> bytes:
        """Fetch bytes [begin, end) of a file."""
        url = huggingface_hub.hf_hub_url(repo_id, name, revision=model.revision)
        headers = {**build_hf_headers(), "Range": f"bytes={begin}-{end - 1}"}
        with get_session().stream(
            "GET", url, headers=headers, follow_redirects=True, timeout=TIMEOUT
        ) as answer:
            if answer.status_code != 206 and not (answer.status_code == 200 and begin == 0):
                raise ModelError(f"the hub answered {answer.status_code} for a part of {name}")
            found = b""
            for piece in answer.iter_bytes():
                found += piece
                if len(found) >= end - begin:
                    break  # the server sends the whole file
        return found[: end - begin]

    try:
        info = huggingface_hub.HfApi().model_info(
            repo_id, revision=model.revision, files_metadata=True, timeout=TIMEOUT
        )
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        files = choose_files(repo_id, list(sizes), model.file, images=images, drafts=drafts)
        for name in files:
            path, size = folder / Path(name).name, sizes[name]
            if name.startswith(FOLDERS) or name in OLDER_TOKENIZERS:
                continue  # no part of a header
            if name.endswith(SIDE_FILES):
                path.write_bytes(fetch(name, 0, size) if size else b"")
            elif is_gguf(name):
                _write_gguf(path, size, partial(fetch, name, 0), is_whole)
            else:
                _write_safetensors(path, size, partial(fetch, name))
    except HfHubHTTPError as error:
        raise ModelError(refusal(model, error)) from error
    except (ModelError, CheckpointError):
        raise
    except Exception as error:  # no route, no name: each library has its own type
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise ModelError(f"cannot reach the hub for {repo_id}: {why}; check the network") from error
    return folder / Path(files[0]).name if is_gguf(files[0]) else folder


def _write_safetensors(path: Path, size: int, fetch: Callable[[int, int], bytes]) -> None:
    start = fetch(0, 8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else _MOST_HEADER
    if length >= min(size, _MOST_HEADER):
        raise ModelError(f"{path.name} on the hub is no safetensors file; choose another model")
    _with_hole(path, start + fetch(8, 8 + length), size)


def _write_gguf(
    path: Path,
    size: int,
    fetch: Callable[[int], bytes],
    is_whole: Callable[[Path], object],
) -> None:
    guess = min(_FIRST_GUESS, size)
    while True:
        _with_hole(path, fetch(guess), size)
        try:
            is_whole(path)
        except CheckpointError:
            if guess >= min(size, _MOST_HEADER):
                raise
            guess = min(2 * guess, size)
        else:
            return


def _with_hole(path: Path, head: bytes, size: int) -> None:
    with path.open("wb") as file:
        file.write(head)
        file.truncate(size)
