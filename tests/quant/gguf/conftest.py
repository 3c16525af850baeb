"""A tiny Llama in a folder whose tokenizer splits words like GPT-2's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

MakeFolder = Callable[..., Path]


@pytest.fixture
def make_folder(make_llama: MakeFolder, alphabet: str) -> MakeFolder:
    """Write the folder; arguments as for `make_llama`."""

    def make(name: str = "readable", **changes: object) -> Path:
        folder = make_llama(name, **{"hidden_size": 256, "intermediate_size": 512} | changes)
        words = {letter: index for index, letter in enumerate([*alphabet[:47], "ab"])}
        backend = Backend(BPE(words, [("a", "b")]))
        backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=True)
        backend.decoder = ByteLevelDecoder()
        backend.add_special_tokens([AddedToken("<|im_end|>", special=True)])
        backend.save(str(folder / "tokenizer.json"))
        template = "{% for one in messages %}{{ one.content }}<|im_end|>{% endfor %}"
        config = {"eos_token": "<|im_end|>", "chat_template": template}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "chat_template.jinja").unlink()
        return folder

    return make
