from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import AutoTokenizer

from appliance.errors import ChatTemplateError, CheckpointError, ModelError
from appliance.tokenizer import Tokenizer

MakeFolder = Callable[..., Path]


@pytest.mark.parametrize(("written", "expected"), [(5, (5,)), ([5, 7], (5, 7)), (None, ())])
def test_eos_ids_of_all_files_are_used(
    make_folder: MakeFolder, tmp_path: Path, written: Any, expected: tuple[int, ...]
) -> None:
    make_folder(tmp_path, eos_token={"content": "<|end|>", "special": True})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": written}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    tokenizer = Tokenizer.from_path(tmp_path)
    end, im_end = tokenizer.encode("<|end|><|im_end|>", add_special_tokens=False)
    assert tokenizer.eos_token_ids == (*expected, 9, end, im_end)


def test_special_tokens_map_is_used_where_the_configuration_is_silent(
    make_folder: MakeFolder, tmp_path: Path
) -> None:
    make_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>"}))
    tokenizer = Tokenizer.from_path(tmp_path)
    assert tokenizer.token_text(tokenizer.bos_token_id or -1) == "<s>"
    assert tokenizer.chat_template is None


def test_template_file_wins_over_the_configuration(make_folder: MakeFolder, tmp_path: Path) -> None:
    make_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0]['content'] }}é")
    template = Tokenizer.from_path(tmp_path).chat_template
    assert template is not None
    assert template.render([{"role": "user", "content": "x"}]) == "<s>xé"


def test_named_templates(make_folder: MakeFolder, tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    template = Tokenizer.from_path(make_folder(tmp_path, chat_template=named)).chat_template
    assert template is not None
    assert template.render([]) == "plain"
    assert template.render([], tools=[{"type": "function"}]) == "tools"


TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "weather"}}]
HELLO = [{"role": "user", "content": "hello"}]
ONE, TWO = "ONE {{ messages[0].content }}", "TWO {{ tools | length }}"


@pytest.mark.parametrize(
    ("config", "files"),
    [
        (ONE, {"additional_chat_templates/tool_use.jinja": TWO, "chat_template.jinja": "A"}),
        ([{"name": "default", "template": ONE}, {"name": "tool_use", "template": TWO}], {}),
        (
            [{"name": "default", "template": ONE}, {"name": "tool_use", "template": TWO}],
            {"chat_template.jinja": "A"},
        ),
        (ONE, {"chat_template.jinja": "A", "additional_chat_templates/rag.jinja": "B"}),
        (ONE, {"chat_template.json": json.dumps({"chat_template": "C"})}),
    ],
)
def test_templates_come_from_where_transformers_takes_them(
    make_folder: MakeFolder, tmp_path: Path, config: Any, files: dict[str, str]
) -> None:
    folder = make_folder(tmp_path, chat_template=config, tokenizer_class="PreTrainedTokenizerFast")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    ours, theirs = Tokenizer.from_path(folder), AutoTokenizer.from_pretrained(folder)
    for tools in (None, TOOLS):
        expected = theirs.apply_chat_template(
            HELLO, tools=tools, tokenize=False, add_generation_prompt=True
        )
        assert ours.decode(ours.encode_chat(HELLO, tools=tools)) == expected


def test_a_folder_may_have_the_template_of_its_processor_alone(
    make_folder: MakeFolder, tmp_path: Path
) -> None:
    """Processors of transformers before 4.50 wrote this file."""
    folder = make_folder(tmp_path, chat_template=None)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": ONE}))
    tokenizer = Tokenizer.from_path(folder)
    assert tokenizer.decode(tokenizer.encode_chat(HELLO)) == "ONE hello"


def test_tools_of_additional_templates_are_not_dropped(
    make_folder: MakeFolder, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path, chat_template=ONE)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TWO)
    tokenizer = Tokenizer.from_path(folder)
    assert tokenizer.decode(tokenizer.encode_chat(HELLO)) == "ONE hello"
    assert tokenizer.decode(tokenizer.encode_chat(HELLO, tools=TOOLS)) == "TWO 1"


def test_truncation_and_padding_of_the_file_are_not_applied(
    make_folder: MakeFolder, tmp_path: Path
) -> None:
    file = make_folder(tmp_path) / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(file))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(file))
    ids = Tokenizer.from_path(tmp_path).encode("the quick brown fox " * 5, add_special_tokens=False)
    assert 4 < len(ids) < 64


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "has no tokenizer.json; add it"),
        ({"tokenizer.model": b"\x0a"}, "tokenizer.model is not SentencePiece's form"),
        ({"tokenizer.json": b""}, "is damaged"),
        ({"tokenizer.json": b"{}"}, "is damaged"),
        (
            {"tokenizer.json": b'{"model": {"type": "BPE", "vocab": {}, "merges": ["a b"]}}'},
            "damaged",
        ),
    ],
)
def test_unusable_folders(tmp_path: Path, files: dict[str, bytes], reason: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError) as caught:
        Tokenizer.from_path(tmp_path)
    assert reason in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_huge_tokenizer_files_are_not_even_read(make_folder: MakeFolder, tmp_path: Path) -> None:
    with (make_folder(tmp_path) / "tokenizer.json").open("r+b") as file:
        file.truncate(500 * 2**20)  # sparse
    with pytest.raises(ModelError, match="500 MiB"):
        Tokenizer.from_path(tmp_path)


def test_damaged_side_files_are_named(make_folder: MakeFolder, tmp_path: Path) -> None:
    make_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json is not valid JSON"):
        Tokenizer.from_path(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja"):
        Tokenizer.from_path(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ChatTemplateError, match="wrong in line 1"):
        Tokenizer.from_path(tmp_path)


def test_chat_without_a_template_says_what_works(make_folder: MakeFolder, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_path(make_folder(tmp_path, chat_template=None))
    assert tokenizer.chat_template is None
    with pytest.raises(ChatTemplateError, match="use completions"):
        tokenizer.encode_chat([{"role": "user", "content": "hello"}])


def test_recommended_sampling_is_read(make_folder: MakeFolder, tmp_path: Path) -> None:
    assert not Tokenizer.from_path(make_folder(tmp_path)).sampling
    written = {"eos_token_id": 1, "do_sample": True, "temperature": 0.6, "top_p": 0.95}
    (tmp_path / "generation_config.json").write_text(json.dumps(written))
    sampling = Tokenizer.from_path(tmp_path).sampling
    assert sampling.values == {"temperature": 0.6, "top_p": 0.95}
    assert sampling.source == "generation_config.json"


@pytest.mark.parametrize("ends", [True, False])
def test_texts_end_as_gtes_own_class_ends_them(
    make_folder: MakeFolder, tmp_path: Path, ends: bool
) -> None:
    """gte-Qwen2-1.5B-instruct has a class of its own beside a plain tokenizer.json."""
    own = ["tokenization_qwen.Qwen2Tokenizer", "tokenization_qwen.Qwen2TokenizerFast"]
    make_folder(
        tmp_path, eos_token="<|im_end|>", add_eos_token=True, auto_map={"AutoTokenizer": own[:ends]}
    )
    file = tmp_path / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(file))
    backend.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    backend.save(str(file))
    plain = backend.encode("hello").ids
    end = backend.token_to_id("<|im_end|>")
    found = Tokenizer.from_path(tmp_path).encode("hello", add_special_tokens=True)
    assert found == [*plain, *([end] if ends else [])]
