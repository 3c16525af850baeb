"""Text for calibration, from files of several kinds and from a hub."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from appliance.errors import QuantizeError
from appliance.quant.text.calibration import CalibrationText, make_calibration
from appliance.quant.text.documents import Document, documents_at, documents_of_dataset, sample

CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


def test_a_folder_gives_every_file_whose_kind_is_known(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("prose")
    (tmp_path / "sub").mkdir()
    write_lines(tmp_path / "sub" / "a.jsonl", {"text": "one", "title": "first"}, {"text": "two"})
    (tmp_path / "picture.png").write_bytes(b"\xff")
    assert list(documents_at(tmp_path)) == [("b", "prose"), ("first", "one"), ("a", "two")]


def test_a_file_of_any_other_name_is_one_text(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("prose")
    assert list(documents_at(tmp_path / "notes")) == [("notes", "prose")]


def test_chats_come_before_text_and_in_one_form(tmp_path: Path) -> None:
    other = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "yes"}]
    path = write_lines(
        tmp_path / "a.jsonl", {"text": "x", "messages": CHAT}, {"conversations": other}
    )
    assert [content for _, content in documents_at(path)] == [CHAT, CHAT]
    assert [content for _, content in documents_at(write_lines(path, {"b": "x"}), "b")] == ["x"]


@pytest.mark.parametrize(
    ("rows", "column", "message"),
    [
        ([{"body": "x"}], None, "row 1 of .* has the columns body, but none of messages"),
        ([{"text": "x"}, {"text": "x"}], "body", "row 1 of .*, but body is not there"),
        ([{"text": "x"}, {"text": 3}], None, "column 'text' of row 2 of .* is no text"),
        ([{"messages": [{"role": "user"}]}], None, "row 1 of .* have no role and content"),
        (["text"], None, "line 1 of .* is no JSON object"),
    ],
)
def test_rows_that_are_no_text_are_named(
    tmp_path: Path, rows: list[Any], column: str | None, message: str
) -> None:
    path = write_lines(tmp_path / "a.jsonl", *rows)
    with pytest.raises(QuantizeError, match=message):
        list(documents_at(path, column))


def test_parquet_without_its_library_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(QuantizeError, match=r"pip install 'appliance\[parquet\]'"):
        list(documents_at(tmp_path / "a.parquet"))


class Hub:
    """Replaces the hub."""

    def __init__(self, folder: Path, files: list[str]) -> None:
        self.folder, self.files = folder, files
        self.fetched: list[tuple[str, str]] = []

    def list_repo_files(self, repo: str, *, repo_type: str) -> list[str]:
        assert repo_type == "dataset"
        if repo != "org/set":
            raise ConnectionError("no such\nplace")
        return self.files

    def download(self, repo: str, name: str, *, repo_type: str) -> str:
        assert repo_type == "dataset"
        self.fetched.append((repo, name))
        return str(self.folder / Path(name).name)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    files = ["README.md", "data/test-0.jsonl", "data/train-1.jsonl", "data/train-0.jsonl", "x.bin"]
    found = Hub(tmp_path, files)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: found)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", found.download)
    for name in ("test-0", "train-0"):
        write_lines(tmp_path / f"{name}.jsonl", {"text": name, "body": "other"})
    return found


@pytest.mark.parametrize(
    ("name", "content", "file"),
    [
        ("org/set", "train-0", "data/train-0.jsonl"),
        ("org/set:test", "test-0", "data/test-0.jsonl"),
        ("org/set:test:body", "other", "data/test-0.jsonl"),
    ],
)
def test_a_data_set_is_the_first_file_of_a_split(
    hub: Hub, name: str, content: str, file: str
) -> None:
    assert [text for _, text in documents_of_dataset(name)] == [content]
    assert hub.fetched == [("org/set", file)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/set:dev", "no split 'dev'; its files are data/test-0.jsonl, data/train-0.jsonl"),
        ("org/none", "cannot fetch the data set org/none: no such$"),
    ],
)
def test_a_data_set_that_cannot_be_had_is_one_line(hub: Hub, name: str, message: str) -> None:
    with pytest.raises(QuantizeError, match=message):
        list(documents_of_dataset(name))


def test_what_a_person_types_is_a_path_or_a_data_set() -> None:
    assert CalibrationText.parse(None, 512, seed=1) == CalibrationText(num_tokens=512, seed=1)
    assert CalibrationText.parse("a.txt", 512, seed=0).path == Path("a.txt")
    parsed = CalibrationText.parse("hf:org/set:train", 512, seed=0)
    assert (parsed.path, parsed.dataset) == (None, "org/set:train")
    assert not parsed.is_at_hand


def test_of_many_documents_a_seed_takes_some() -> None:
    documents: list[Document] = [(str(i), "") for i in range(1000)]
    assert sample(documents[:50], 50, 0) == documents[:50]
    taken = sample(iter(documents), 50, 0)
    assert taken == sample(iter(documents), 50, 0) != sample(iter(documents), 50, 1)
    numbers = [int(title) for title, _ in taken]
    assert len(set(numbers)) == 50
    assert 350 < sum(numbers) / 50 < 650, "from all over"


class Template(SimpleNamespace):
    """A character tokenizer that records its inputs."""

    chat_template: object = None
    is_isolated = False

    def isolate_template(self) -> None:
        self.is_isolated = True

    def encode(self, text: str, **_: bool) -> list[int]:
        return [ord(letter) for letter in text]

    def encode_chat(self, messages: list[dict[str, str]], **_: bool) -> list[int]:
        return [ord(message["role"][0]) for message in messages]


def rows_of(tokenizer: Template, *documents: Document) -> list[list[int]]:
    made = make_calibration(
        documents,
        tokenizer,  # type: ignore[arg-type]
        source="a test",
        num_tokens=2,
        row_tokens=2,
        seed=0,
    )
    assert isinstance(made.rows.tolist(), list)
    return [list(row) for row in made.rows.tolist()]


def test_chats_go_through_the_template_of_the_model() -> None:
    with_template = Template(chat_template="{{ messages }}")
    assert rows_of(with_template, ("a", CHAT)) == [[ord("u"), ord("a")]]
    assert rows_of(with_template, ("a", "text")) == [[ord("u"), ord("a")]]
    assert with_template.is_isolated, "its author is a stranger"
    letters = [ord(letter) for letter in "hello\n\nyes"]
    (row,) = rows_of(Template(), ("a", CHAT))
    assert row in [letters[i : i + 2] for i in range(0, 10, 2)]
