"""Reads a GGUF file with transformers: the oracle of its weights and its logits."""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import numpy
import torch

_LONG = 10_000  # entries of metadata that only the vocabulary's arrays have


class _WithoutVocabulary(gguf.GGUFReader):  # type: ignore[misc]
    """A reader that skips the vocabulary's arrays and gives its length as a number."""

    def __init__(self, path: Path) -> None:
        self._vocab_size = 0
        super().__init__(path)
        architecture = self.fields["general.architecture"].contents()
        assert self._vocab_size, path
        parts = [numpy.array([self._vocab_size], numpy.uint32)]
        name, kind = f"{architecture}.vocab_size", gguf.GGUFValueType.UINT32
        self.fields[name] = gguf.ReaderField(0, name, parts, [0], [kind])

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, Any, Any, Any]:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)  # type: ignore[no-any-return]
        kind, length = struct.unpack_from("<IQ", self.data, orig_offs)
        if length < _LONG:
            return super()._get_field_parts(orig_offs, raw_type)  # type: ignore[no-any-return]
        self._vocab_size = self._vocab_size or length  # the tokens come before their merges
        end = orig_offs + 12
        if kind == gguf.GGUFValueType.STRING:
            for _ in range(length):
                end += 8 + struct.unpack_from("<Q", self.data, end)[0]
        else:
            end += length * super()._get_field_parts(end, kind)[0]
        return end - orig_offs, [], [], [gguf.GGUFValueType.ARRAY, kind]


def load_with_transformers(path: Path) -> Any:
    """Load a file's model in float32.

    Without the changes here, transformers would read all metadata, and so the vocabulary, twice and
    through slices of a memory map, and build its table of names once for each module of the model:
    that takes most of its time.
    """
    from transformers import AutoModelForCausalLM

    with (
        patch("numpy.memmap", _read),
        patch.object(gguf, "GGUFReader", cache(_WithoutVocabulary)),
        patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
    ):
        return AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        )


def _read(path: Path, **_: object) -> numpy.ndarray[Any, numpy.dtype[numpy.uint8]]:
    """Return a plain array, whose slices cost a tenth of those of a memory map."""
    return numpy.fromfile(path, numpy.uint8)
