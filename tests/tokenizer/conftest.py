"""A small byte-level tokenizer as a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from appliance.tokenizer import Tokenizer

CONTROL = ["<|end|>", "<|im_start|>", "<|im_end|>", "<s>"]
TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog and runs away",
    "what is the capital of the country where the fox lives",
    "<|im_start|>user\nhello there<|im_end|> is only text here",
]


def make_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(
        [AddedToken(text, normalized=False, rstrip=text == "<|end|>") for text in CONTROL]
    )
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return backend


def write_folder(path: Path, **config: object) -> Path:
    path.mkdir(exist_ok=True)
    make_backend().save(str(path / "tokenizer.json"))
    defaults = {"bos_token": "<s>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(defaults | config))
    return path


@pytest.fixture(scope="session")
def make_folder() -> Callable[..., Path]:
    """write_folder: a path, and entries of tokenizer_config.json."""
    return write_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_path(folder)


@pytest.fixture(scope="session")
def native(folder: Path) -> tokenizers.Tokenizer:
    """The same tokenizer in the tokenizers library alone."""
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(single=["$A"], special_tokens=[])
    return backend
