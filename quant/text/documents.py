"""Reads calibration text from files, folders and a hub's data sets, one document at a time.

A document is a title and either a text or the messages of a chat.
"""

from __future__ import annotations

import contextlib
import json
import random
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from appliance.errors import QuantizeError

Message = dict[str, Any]
Document = tuple[str, str | list[Message]]

PLAIN = (".txt", ".md", ".rst")
LINES = (".jsonl", ".ndjson")
PARQUET = ".parquet"
SUFFIXES = (*PLAIN, *LINES, PARQUET)
COLUMNS = ("messages", "conversations", "text", "content")  # in order of preference
SPLIT = "train"
DATASET_PREFIX = "hf:"
# Modules of many authors and purposes, in every release since 3.11; PSF licence.
LIBRARY = (
    "argparse", "ast", "bisect", "calendar", "collections/__init__", "concurrent/futures/thread",
    "configparser", "contextlib", "csv", "dataclasses", "difflib", "email/header", "enum",
    "fnmatch", "fractions", "functools", "heapq", "html/parser", "http/client", "http/cookies",
    "inspect", "ipaddress", "json/decoder", "json/encoder", "logging/handlers", "mailbox",
    "mimetypes", "optparse", "pickle", "plistlib", "pprint", "queue", "random", "selectors",
    "shlex", "shutil", "socketserver", "statistics", "string", "subprocess", "tarfile",
    "tempfile", "textwrap", "threading", "tokenize", "traceback", "unittest/case",
    "urllib/parse", "uuid", "weakref", "xml/dom/minidom", "xmlrpc/client", "zipfile",
)  # fmt: skip
_ROLES = {"human": "user", "gpt": "assistant"}


def default_documents(*, held_out: bool) -> list[tuple[str, str]]:
    """List title and text of Python's help topics: the held-out half, or the other.

    Calibration reads the other half only where the model writes no text.
    """
    return [(name, topics[name]) for name in sorted(topics)[int(held_out) :: 2]]


def library_sources() -> list[tuple[str, str]]:
    """List name and text of modules of Python's standard library, as far as they are installed."""
    found = []
    folder = Path(sysconfig.get_path("stdlib"))
    for name in LIBRARY:
        path = folder / f"{name}.py"
        with contextlib.suppress(OSError, UnicodeDecodeError):
            found.append((path.name, path.read_text(encoding="utf-8")))
    return found


def documents_at(path: Path, column: str | None = None) -> Iterator[Document]:
    """Yield the documents of a file, or of all readable files below a folder.

    Args:
        path: .jsonl and .parquet files have a document per row, other files are one document.
        column: of the rows; by default the first of `COLUMNS` they have.

    Raises:
        QuantizeError: there is nothing to read, or it is malformed.
    """
    files = [path]
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    if not files:
        raise QuantizeError(f"{path} holds no {', '.join(SUFFIXES)} file to calibrate with")
    for file in files:
        try:
            if file.suffix in LINES:
                yield from _rows(file, _json_lines(file), column)
            elif file.suffix == PARQUET:
                yield from _rows(file, _parquet(file), column)
            else:
                yield file.stem, file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise QuantizeError(f"cannot read calibration text {file}: {error}") from error


def documents_of_dataset(name: str) -> Iterator[Document]:
    """Yield the documents in the first file of a split of a hub's data set.

    `name` is org/name, org/name:split or org/name:split:column.

    Raises:
        QuantizeError: the data set is missing, unreachable, or has no readable file.
    """
    # Imported here: it takes 0.2 s, and most text is local.
    import huggingface_hub

    repo, _, rest = name.partition(":")
    split, _, column = rest.partition(":")
    try:
        files = huggingface_hub.HfApi().list_repo_files(repo, repo_type="dataset")
        chosen = _file_of_split(name, files, split or SPLIT)
        path = huggingface_hub.hf_hub_download(repo, chosen, repo_type="dataset")
    except QuantizeError:
        raise
    except Exception as error:  # no route, no name, no such repository: all of different types
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise QuantizeError(f"cannot fetch the data set {repo}: {reason}") from error
    yield from documents_at(Path(path), column or None)


def sample(documents: Iterable[Document], most: int, seed: int) -> list[Document]:
    """Draw up to `most` documents uniformly (reservoir sampling)."""
    rng = random.Random(seed)
    taken: list[Document] = []
    for index, document in enumerate(documents):
        if index < most:
            taken.append(document)
        elif (place := rng.randrange(index + 1)) < most:
            taken[place] = document
    return taken


def _file_of_split(name: str, files: list[str], split: str) -> str:
    usable = sorted(file for file in files if Path(file).suffix in SUFFIXES)
    usable = [file for file in usable if Path(file).name.lower() != "readme.md"]
    found = [file for file in usable if split in file.replace("_", "/").replace("-", "/")]
    if found:
        return found[0]
    if not usable:
        raise QuantizeError(f"the data set {name} has no {', '.join(SUFFIXES)} file")
    listed = ", ".join(usable[:6]) + (", ..." if len(usable) > 6 else "")
    raise QuantizeError(f"the data set {name} has no split {split!r}; its files are {listed}")


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                raise QuantizeError(f"line {number} of {path} is no JSON object")
            yield row


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise QuantizeError(
            f"{path.name} can be read with pyarrow only: pip install 'appliance[parquet]', or give"
            " the text as .jsonl or .txt"
        ) from error
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=256):
            yield from batch.to_pylist()
    except pyarrow.lib.ArrowException as error:
        raise QuantizeError(f"{path} is no usable parquet file: {error}") from error


def _rows(path: Path, rows: Iterator[dict[str, Any]], column: str | None) -> Iterator[Document]:
    for number, row in enumerate(rows, 1):
        name = column or next((name for name in COLUMNS if name in row), None)
        if name is None or name not in row:
            wanted = column or f"none of {', '.join(COLUMNS)}"
            raise QuantizeError(
                f"row {number} of {path} has the columns {', '.join(row)}, but {wanted}"
                + (" is not there" if column else " to calibrate with")
            )
        title = row.get("title")
        value = row[name]
        if isinstance(value, list):
            value = [_message(path, number, message) for message in value]
        elif not isinstance(value, str):
            raise QuantizeError(f"column {name!r} of row {number} of {path} is no text and no chat")
        yield title if isinstance(title, str) else path.stem, value


def _message(path: Path, number: int, message: object) -> Message:
    """Convert a message to chat templates' form, from either of two common spellings."""
    match message:
        case {"role": str(role), "content": str(content)}:
            return {"role": role, "content": content}
        case {"from": str(role), "value": str(content)}:
            return {"role": _ROLES.get(role, role), "content": content}
    raise QuantizeError(
        f"row {number} of {path} holds a chat whose messages have no role and content"
    )
