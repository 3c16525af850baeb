"""Names and downloads models of a Hugging Face hub, with huggingface_hub, into its cache.

HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE have their usual meaning.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from appliance.errors import ModelError, one_line
from appliance.files import read_text
from appliance.hub.growth import Progress, watch_growth
from appliance.model_files.files_beside import nearest_first
from appliance.model_files.gguf_names import (
    first_parts,
    is_beside_a_model,
    is_draft_head,
    is_gguf,
    is_projector,
    parts_of_name,
)
from appliance.wording import as_size

logger = logging.getLogger(__name__)

TIMEOUT = 10.0  # seconds for the hub to answer
SIDE_FILES = (".json", ".jinja")
# Folders whose side files are read, too: templates for tools, and settings of embedding models.
FOLDERS = ("additional_chat_templates/", "1_Pooling/", "1_LogitScore/")
# Linears that sentence-transformers applies to vectors, with weights of their own.
_DENSE = re.compile(r"\d+_Dense/(config\.json|model\.safetensors)")
# Read where there is no tokenizer.json.
OLDER_TOKENIZERS = ("tokenizer.model", "merges.txt", "tiktoken.model")
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_FORM = re.compile(
    r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>(?!.*\.\.)\w[\w./-]*))?(?::(?P<file>[^:\\]+\.(?i:gguf)))?",
    re.ASCII,
)

# (repository, names of its files, requested file) to the files to download
ChooseFiles = Callable[[str, list[str], str | None], list[str]]


@dataclass(frozen=True, slots=True)
class HubName:
    """A hub's name of a model: `org/name`, with `@revision`, `:FILE.gguf`, or both.

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


def download(
    name: HubName,
    progress: Progress,
    *,
    choose: ChooseFiles | None = None,
    images: bool = False,
    drafts: bool = False,
) -> Path:
    """Download a model's missing files into the hub cache.

    Args:
        choose: chooses the files; `choose_files` by default.
        images: also fetch the projector file of a GGUF model, if there is one.
        drafts: also fetch the file with its draft head, if there is one.

    Returns:
        The folder, or the GGUF file, the first of several parts.

    Raises:
        ModelError: the model does not exist, cannot be reached, or has no usable file.
    """
    # Imported here: it takes 0.2 s, and most models are already here.
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    repo_id, choose = name.repo, choose or partial(choose_files, images=images, drafts=drafts)
    folder = hub_cache() / folder_name(repo_id)
    try:
        info = huggingface_hub.HfApi().model_info(
            repo_id, revision=name.revision, files_metadata=True, timeout=TIMEOUT
        )
    except HfHubHTTPError as error:
        raise ModelError(refusal(name, error)) from error
    except Exception as error:  # no route, no name, offline mode: each library has its own type
        return _cached(folder, name, choose, error)

    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    files = choose(repo_id, list(sizes), name.file)
    total = sum(sizes[file] for file in files)
    _check_space(folder, repo_id, total)
    huggingface_hub.utils.disable_progress_bars()
    try:
        with watch_growth(folder / "blobs", f"download {repo_id}", total, progress):
            snapshot = huggingface_hub.snapshot_download(
                repo_id, revision=name.revision, allow_patterns=files
            )
    except HfHubHTTPError as error:
        raise ModelError(refusal(name, error)) from error
    except Exception as error:
        raise ModelError(
            f"the download of {repo_id} failed: {one_line(error)}; start again, "
            "what is complete is kept"
        ) from error
    return _usable(Path(snapshot), files)


def hub_cache() -> Path:
    """Return the folder of all downloaded models of the hub."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def find_cached(name: HubName) -> Path | None:
    """Return a model's folder or GGUF file in the hub cache; None if it is not there."""
    try:
        return _find(hub_cache() / folder_name(name.repo), name, choose_files)
    except (OSError, ModelError):
        return None


def folder_name(repo_id: str) -> str:
    return f"models--{repo_id.replace('/', '--')}"


def choose_files(
    repo_id: str,
    names: list[str],
    filename: str | None,
    *,
    images: bool = False,
    drafts: bool = False,
) -> list[str]:
    """Choose a repository's files to download, none of which may contain code.

    Args:
        images: the projector file of a GGUF model comes behind it, if there is one.
        drafts: the file with its draft head comes last, if there is one.

    Raises:
        ModelError: no file is usable, or the choice is ambiguous.
    """
    ggufs = first_parts(names)
    models = [name for name in ggufs if not is_beside_a_model(name)]
    named = models or ggufs
    some_ggufs = ", ".join(named[:8]) + (", ..." if len(named) > 8 else "")
    if filename is not None:
        files = list(parts_of_name(filename))
        if filename in names and (missing := [file for file in files if file not in names]):
            raise ModelError(
                f"{repo_id} lacks {missing[0]}, one of {len(files)} parts of that model; choose "
                "another of its files"
            )
        if filename in names and is_projector(filename):
            raise ModelError(
                f"{repo_id}:{filename} is a projector file, with which a model reads pictures, and"
                f" no model itself; name the model, {'of ' + some_ggufs if models else 'elsewhere'}"
            )
        if filename in names and is_draft_head(filename):
            raise ModelError(
                f"{repo_id}:{filename} is a model's draft head, which is fetched with the model,"
                " and no model itself; name the model,"
                f" {'of ' + some_ggufs if models else 'elsewhere'}"
            )
        if filename in names and is_gguf(filename):
            projectors = nearest_first(filename, names)[:1] if images else []
            heads = nearest_first(filename, ggufs, is_draft_head)[:1] if drafts else []
            return [*files, *projectors, *(part for one in heads for part in parts_of_name(one))]
        raise ModelError(
            f"{repo_id} has no GGUF file {filename!r}; "
            + (f"it has {some_ggufs}" if ggufs else f"try {repo_id} without a file name")
        )
    top = [name for name in names if "/" not in name]
    every = [n for n in top if n.endswith(".safetensors")]
    weights = [n for n in every if n.startswith("model")]
    weights = weights or [n for n in every if not n.startswith(("adapter", "consolidated"))]
    if weights:
        older = () if "tokenizer.json" in top else OLDER_TOKENIZERS
        return weights + [
            name
            for name in names
            if (name.endswith(SIDE_FILES) and (name in top or name.startswith(FOLDERS)))
            or name in older
            or _DENSE.fullmatch(name)
        ]
    if len(models) == 1:
        return choose_files(repo_id, names, models[0], images=images, drafts=drafts)
    if ggufs and not models:
        raise ModelError(
            f"{repo_id} has GGUF files that belong to a model, and none of a model: {some_ggufs};"
            " choose the model's repository"
        )
    if ggufs:
        raise ModelError(
            f"{repo_id} has several GGUF files; name one as {repo_id}:FILE, of {some_ggufs}"
        )
    if any(name.endswith(PICKLED) for name in names):
        raise ModelError(
            f"{repo_id} has only pickled weights, which can run code when they are loaded; "
            "choose a model in safetensors or GGUF form"
        )
    raise ModelError(f"{repo_id} has neither safetensors nor GGUF files; choose another model")


def _cached(folder: Path, name: HubName, choose: ChooseFiles, cause: Exception) -> Path:
    try:
        path = _find(folder, name, choose)
    except (OSError, ModelError) as error:
        raise ModelError(
            f"cannot reach the hub for {name} ({one_line(cause)}), and it is not in the cache; "
            "check the network, or give a folder or a .gguf file"
        ) from error
    logger.warning("%s is used as cached; the hub cannot be reached", name)
    return path


def _find(folder: Path, name: HubName, choose: ChooseFiles) -> Path:
    revision = name.revision or "main"
    snapshot = folder / "snapshots" / revision  # if it is a commit
    if not snapshot.is_dir():
        snapshot = folder / "snapshots" / read_text(folder / "refs" / revision).strip()
    names = [str(p.relative_to(snapshot)) for p in snapshot.rglob("*") if p.is_file()]
    return _usable(snapshot, choose(name.repo, names, name.file))


def _usable(snapshot: Path, files: list[str]) -> Path:
    return snapshot / files[0] if is_gguf(files[0]) else snapshot


def _check_space(folder: Path, repo_id: str, needed: int) -> None:
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    cached = sum(file.stat().st_size for file in folder.glob("blobs/*") if file.is_file())
    if needed > free + cached:
        raise ModelError(
            f"{repo_id} needs {as_size(needed)}, but {existing} has {as_size(free)} free;"
            " make room or point HF_HOME to another disk"
        )


def refusal(name: HubName, error: Any) -> str:
    """Describe a hub's error status and what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repo_id = name.repo
    status = error.response.status_code if error.response is not None else None
    if isinstance(error, GatedRepoError):
        return f"{repo_id} is gated; accept its terms on the hub, then set HF_TOKEN to your token"
    if isinstance(error, RevisionNotFoundError):
        return (
            f"{repo_id} has no revision {name.revision!r}; name a branch, a tag or a commit of it"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"the hub has no model {repo_id}, or it is private; check the spelling, "
            "or set HF_TOKEN to a token that may read it"
        )
    if status in (401, 403):
        return f"the hub refuses {repo_id} ({status}); set HF_TOKEN to a token that may read it"
    return f"the hub answered {status} for {repo_id}; try again later"
