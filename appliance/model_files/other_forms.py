"""Names the forms of models that other programs read, by first bytes and by names of files.

A leaf: of weights it never opens what a file holds beyond its first bytes, and runs nothing.
"""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

from appliance.files import read_json

_HEAD_BYTES = 512
_TAKE = "take the model in safetensors or GGUF form"
PICKLED_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
_PICKLED = "pickled weights, which can run code when they are loaded"
_IMATRIX = "an importance matrix, which llama.cpp quantizes with"
_OLD_GGML = "a GGML file of before August 2023, whose form llama.cpp left for GGUF"

# The first bytes of a file; of ggml's older forms a magic number in little-endian order.
_MAGIC: tuple[tuple[bytes, str, str], ...] = (
    *((magic, _OLD_GGML, "take the model's GGUF file") for magic in (b"lmgg", b"fmgg", b"tjgg")),
    (b"algg", "an adapter of before August 2023 (ggla)", "convert it from its original folder"),
    (b"PK\x03\x04", "a zip archive", "unpack it and give the folder"),
    (b"\x1f\x8b", "a compressed archive", "unpack it and give the folder"),
    (b"7z\xbc\xaf", "a 7z archive", "unpack it and give the folder"),
    (b"Rar!", "a RAR archive", "unpack it and give the folder"),
    (b"(\xb5/\xfd", "a compressed archive", "unpack it and give the folder"),
    (b"\xfd7zXZ", "a compressed archive", "unpack it and give the folder"),
    (b"\x89HDF", "weights of TensorFlow (HDF5)", _TAKE),
    (b"version https://git-lfs", "a Git LFS pointer", "fetch the file with `git lfs pull`"),
    (b"FROM ", "an Ollama Modelfile", "give the file or model that its FROM line names"),
)
_ENDINGS = {
    ".onnx": ("an ONNX model", _TAKE),
    ".tflite": ("a TensorFlow Lite model", _TAKE),
    ".litertlm": ("a LiteRT-LM model", _TAKE),
    ".task": ("a MediaPipe model", _TAKE),
    ".h5": ("weights of TensorFlow (HDF5)", _TAKE),
    ".msgpack": ("weights of Flax", _TAKE),
    ".engine": ("an engine of TensorRT-LLM", _TAKE),
    ".pte": ("a program of ExecuTorch", _TAKE),
    ".tar": ("an archive", "unpack it and give the folder"),
}
_PARTS = (".safetensors", "config.json", "tokenizer.json", ".index.json")
# Files of a folder without weights that are read here, most telling first.
_MERGE = "make safetensors of it with `accelerate merge-weights` or the program that trained it"
_FOLDERS: tuple[tuple[str, str, str], ...] = (
    ("zero_to_fp32.py", "a checkpoint of DeepSpeed", "run its zero_to_fp32.py with safetensors"),
    ("*.distcp", "a training checkpoint in parts (distcp)", _MERGE),
    ("openvino*.xml", "a model of OpenVINO", _TAKE),
    ("*.onnx", "an ONNX model", _TAKE),
    ("onnx/*.onnx", "an ONNX model", _TAKE),
    ("*.engine", "an engine of TensorRT-LLM", _TAKE),
    ("*.mlmodelc", "a model of Core ML", _TAKE),
    ("Manifest.json", "a model of Core ML", _TAKE),
    ("params_shard_*.bin", "a model of MLC", _TAKE),
    ("*.h5", "weights of TensorFlow", _TAKE),
    ("*.msgpack", "weights of Flax", _TAKE),
    ("*.pte", "a program of ExecuTorch", _TAKE),
)
_UNFINISHED = (".incomplete", ".aria2", ".part", ".partial", ".crdownload", ".download")
_INSIDE = ("*/*.safetensors", "*/*.gguf", "snapshots/*/*.safetensors", "snapshots/*/*.gguf")


def form_of_file(path: Path) -> tuple[str, str]:
    """Return what a file is that is no GGUF file, and what to do.

    Raises:
        OSError: it is unreadable.
    """
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    is_pickled = path.suffix in PICKLED_SUFFIXES
    if is_pickled and head.startswith((b"PK\x03\x04", b"\x80")):
        return f"a file of {_PICKLED}", _TAKE
    if path.name.endswith(_PARTS):
        return "part of a model", "give the folder that holds it"
    for magic, what, advice in _MAGIC:
        if head.startswith(magic):
            return what, advice
    if head[257:262] == b"ustar":
        return _ENDINGS[".tar"]
    if path.suffix == ".dat" and "imatrix" in path.name:
        return _IMATRIX, "give the model's own file"
    unknown = "no GGUF file", "give a .gguf file or a folder with safetensors"
    return _ENDINGS.get(path.suffix.lower(), unknown)


def kind_of_folder(path: Path) -> str | None:
    """Return why a folder is no model of config.json, and what to do; None if it may be one.

    Raises:
        CheckpointError: an adapter's settings are damaged.
    """
    if os.path.lexists(path / "config.json"):
        return None
    if (path / "adapter_config.json").is_file():
        base = read_json(path / "adapter_config.json").get("base_model_name_or_path")
        named = f" of {base}" if isinstance(base, str) and base else ""
        return f"{path} is an adapter{named}; give that model, and the adapter with --lora"
    if (path / "params.json").is_file():
        return (
            f"{path} has a model as its makers train it, with params.json; give the folder of the"
            " same model with config.json, as transformers reads it"
        )
    if (path / "model_index.json").is_file():
        return f"{path} is a pipeline of diffusers, which makes no text; give a language model"
    return None


def form_of_folder(path: Path) -> tuple[str, str] | None:
    """Return what a folder holds in place of weights that are read here, and what to do."""
    unfinished = sorted(file.name for file in path.iterdir() if file.suffix in _UNFINISHED)
    if unfinished:
        return f"an unfinished download, {unfinished[0]}", "finish it, or fetch the model again"
    for pattern, what, advice in _FOLDERS:
        if any(path.glob(pattern)):
            return what, advice
    if any(file.suffix in PICKLED_SUFFIXES for file in path.iterdir()):
        return f"only {_PICKLED}", "use a version of the model in safetensors or GGUF form"
    return None


def models_inside(path: Path, most: int = 8) -> list[str]:
    """List folders in a folder that hold weights, relative to it."""
    found = (file.parent for pattern in _INSIDE for file in islice(path.glob(pattern), 64))
    names = {str(folder.relative_to(path)) for folder in found}
    return sorted(names)[:most]
