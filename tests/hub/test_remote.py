"""Downloads from a local replacement of the hub, each in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.runs.forked_commands import ForkedCommands

from appliance.errors import ModelError
from appliance.hub.remote import choose_files

RESOLVE = """
import json, sys
from pathlib import Path
from appliance.errors import ModelError
from appliance.hub import resolve_adapter, resolve_model
for model in sys.argv[2:]:
    progress = []
    report = lambda *values: progress.append(values)
    try:
        if "-lora" in model:
            print(json.dumps({"path": str(resolve_adapter(model))}))
            continue
        found = resolve_model(model, cache_dir=Path(sys.argv[1]), progress=report)
        print(json.dumps({"path": str(found.path), "name": found.name, "progress": progress}))
    except ModelError as error:
        print(json.dumps({"error": str(error)}))
"""

WEIGHTS = bytes(range(256)) * 4096  # 1 MiB
FOLDER = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": WEIGHTS,
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"\x80\x04.",
    "modeling_custom.py": b"print('run')",
    "README.md": b"# model",
    "onnx/model.onnx": b"onnx",
    "original/model.safetensors": b"other",
}
GGUFS = {"a-Q4_0.gguf": b"GGUF" + bytes(100), "a-Q8_0.gguf": b"GGUF" + bytes(200)}
PARTS = [f"big-Q4_0-0000{number}-of-00003.gguf" for number in (1, 2, 3)]

ResolveAll = Callable[..., list[dict[str, Any]]]
Resolve = Callable[..., dict[str, Any]]


@pytest.fixture
def resolve_all(commands: ForkedCommands, tmp_path: Path) -> ResolveAll:
    """Resolve one model after another in a process of their own."""

    def resolve_all(models: list[str], endpoint: str, **environment: str) -> list[dict[str, Any]]:
        places = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path)}
        result = commands.run(tmp_path / "cache", *models, code=RESOLVE, **places, **environment)
        assert result.returncode == 0, result.stderr
        return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]

    return resolve_all


@pytest.fixture
def resolve(resolve_all: ResolveAll) -> Resolve:
    def resolve(model: str, endpoint: str, **environment: str) -> dict[str, Any]:
        (answer,) = resolve_all([model], endpoint, **environment)
        return answer

    return resolve


def test_folder_without_what_could_run(resolve_all: ResolveAll, hub: Any, tmp_path: Path) -> None:
    hub.repos["org/model"] = FOLDER
    found, again = resolve_all(["org/model"] * 2, hub.url)
    path = Path(found["path"])
    assert found["name"] == "org/model"
    assert sorted(file.name for file in path.iterdir()) == [
        "chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"
    ]  # fmt: skip
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    total = sum(len(FOLDER[file.name]) for file in path.iterdir())
    stages = {tuple(report) for report in found["progress"]}
    assert ("download org/model", 0, total) in stages
    assert ("download org/model", total, total) in stages

    assert again["path"] == found["path"]
    assert sorted(hub.downloaded()) == sorted(file.name for file in path.iterdir()), "each once"


def test_an_adapter_comes_the_same_way(resolve: Resolve, hub: Any, tmp_path: Path) -> None:
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": WEIGHTS}
    hub.repos["org/a-lora"] = {**files, "adapter_model.bin": b"\x80\x04.", "run.py": b"print()"}
    found = resolve("org/a-lora", hub.url)
    path = Path(found["path"])
    assert {file.name: file.read_bytes() for file in path.iterdir()} == files
    assert resolve("org/a-lora", "http://127.0.0.1:9") == found, "without the hub"


def test_cached_models_work_without_the_hub(resolve: Resolve, hub: Any, tmp_path: Path) -> None:
    hub.repos["org/model"] = FOLDER
    found = resolve("org/model", hub.url)
    nowhere = "http://127.0.0.1:9"
    assert resolve("org/model", nowhere)["path"] == found["path"]
    assert resolve("org/model", hub.url, HF_HUB_OFFLINE="1")["path"] == found["path"]


def test_a_cut_connection_is_resumed_where_it_broke(
    resolve: Resolve, hub: Any, tmp_path: Path
) -> None:
    mib = 2**20
    weights = WEIGHTS * 24
    hub.repos["org/model"] = {**FOLDER, "model.safetensors": weights}
    hub.cut_after["model.safetensors"] = [13 * mib]
    found = resolve("org/model", hub.url)
    assert (Path(found["path"]) / "model.safetensors").read_bytes() == weights
    ranges = [r for m, p, r in hub.requests if m == "GET" and p.endswith("/model.safetensors")]
    # huggingface_hub stores chunks of 10 MiB.
    assert ranges == [None, f"bytes={10 * mib}-"]


def test_a_failed_download_keeps_complete_files_only(
    resolve: Resolve, hub: Any, tmp_path: Path
) -> None:
    hub.repos["org/model"] = FOLDER
    hub.shortened.add("model.safetensors")
    failed = resolve("org/model", hub.url)["error"]
    assert "the download of org/model failed" in failed
    assert "start again" in failed
    kept = {file.name for file in tmp_path.glob("hub/models--org--model/snapshots/*/*")}
    assert "model.safetensors" not in kept
    assert not list(tmp_path.glob("hub/models--org--model/blobs/*.incomplete"))

    hub.shortened.clear()
    before = len(hub.downloaded())
    found = resolve("org/model", hub.url)
    assert (Path(found["path"]) / "model.safetensors").read_bytes() == WEIGHTS
    assert set(hub.downloaded()[before:]).isdisjoint(kept)


def test_one_gguf_file_of_several(resolve_all: ResolveAll, hub: Any, tmp_path: Path) -> None:
    hub.repos["org/model-GGUF"] = {**GGUFS, "README.md": b"#"}
    found, unnamed = resolve_all(["org/model-GGUF:a-Q4_0.gguf", "org/model-GGUF"], hub.url)
    assert Path(found["path"]).read_bytes() == GGUFS["a-Q4_0.gguf"]
    assert hub.downloaded() == ["a-Q4_0.gguf"]
    assert "several GGUF files; name one as org/model-GGUF:FILE" in unnamed["error"]


def test_all_parts_of_a_model(resolve_all: ResolveAll, hub: Any, tmp_path: Path) -> None:
    """The model is named by any of its parts, and is in the cache only if all of them are."""
    content = {part: b"GGUF" + bytes(50 + number) for number, part in enumerate(PARTS)}
    hub.repos["org/big"] = {**content, **GGUFS}
    found, second = resolve_all([f"org/big:{PARTS[1]}", f"org/big:{PARTS[0]}"], hub.url)
    path = Path(found["path"])
    assert path.name == PARTS[0]
    assert second["path"] == found["path"]
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == content
    assert sorted(hub.downloaded()) == PARTS
    path.with_name(PARTS[2]).unlink()
    (cut,) = resolve_all([f"org/big:{PARTS[0]}"], "http://127.0.0.1:9")
    assert "it is not in the cache" in cut["error"]


def test_missing_and_refused_repositories(
    resolve_all: ResolveAll, resolve: Resolve, hub: Any, tmp_path: Path
) -> None:
    hub.repos["org/gated"] = FOLDER
    hub.refused.add("org/gated")
    missing, gated = resolve_all(["org/none", "org/gated"], hub.url)
    assert "the hub has no model org/none" in missing["error"]
    assert "set HF_TOKEN" in gated["error"]
    assert hub.downloaded() == []
    assert "path" in resolve("org/gated", hub.url, HF_TOKEN="hf_secret")


def test_no_way_to_the_hub(resolve: Resolve, tmp_path: Path) -> None:
    for environment in ({}, {"HF_HUB_OFFLINE": "1"}):
        message = resolve("org/model", "http://127.0.0.1:9", **environment)["error"]
        assert "cannot reach the hub for org/model" in message
        assert "give a folder or a .gguf file" in message
        assert "\n" not in message


@pytest.mark.parametrize(
    ("names", "filename", "chosen"),
    [
        (list(FOLDER), None,
         ["model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"]),
        (["model-1-of-2.safetensors", "model-2-of-2.safetensors", "consolidated.safetensors",
          "model.safetensors.index.json"], None,
         ["model-1-of-2.safetensors", "model-2-of-2.safetensors", "model.safetensors.index.json"]),
        (["model.safetensors", "tokenizer.json", "tokenizer.model", "merges.txt", "a/b.json",
          "additional_chat_templates/tool_use.jinja", "1_Pooling/config.json", "1_Pooling/x.py"],
         None, ["model.safetensors", "tokenizer.json", "additional_chat_templates/tool_use.jinja",
                "1_Pooling/config.json"]),
        (["model.safetensors", "tokenizer.model", "merges.txt", "vocab.json", "a.txt"], None,
         ["model.safetensors", "tokenizer.model", "merges.txt", "vocab.json"]),
        (["gptq_model-4bit-128g.safetensors", "adapter_model.safetensors", "config.json"], None,
         ["gptq_model-4bit-128g.safetensors", "config.json"]),
        (["a.gguf", "README.md"], None, ["a.gguf"]),
        (["sub/a.gguf", "b.gguf"], "sub/a.gguf", ["sub/a.gguf"]),
        (["A.GGUF", "mmproj-A-f16.gguf"], None, ["A.GGUF"]),
        ([*PARTS, "README.md"], None, PARTS),
        ([*PARTS, "b.gguf"], PARTS[1], PARTS),
        ([f"sub/{part}" for part in PARTS], f"sub/{PARTS[0]}", [f"sub/{part}" for part in PARTS]),
    ],
)  # fmt: skip
def test_choice_of_files(names: list[str], filename: str | None, chosen: list[str]) -> None:
    assert choose_files("org/m", names, filename) == chosen


@pytest.mark.parametrize(
    ("names", "filename", "chosen"),
    [
        (["A-Q4_0.gguf", "mmproj-A-f16.gguf"], None, ["A-Q4_0.gguf", "mmproj-A-f16.gguf"]),
        (["A-Q4_0.gguf", "B.gguf", "mmproj-F32.gguf", "mmproj-F16.gguf"], "A-Q4_0.gguf",
         ["A-Q4_0.gguf", "mmproj-F16.gguf"]),
        ([*PARTS, "mmproj-F16.gguf"], PARTS[1], [*PARTS, "mmproj-F16.gguf"]),
        (["A-Q4_0.gguf"], None, ["A-Q4_0.gguf"]),
        (["model.safetensors", "mmproj-F16.gguf"], None, ["model.safetensors"]),
    ],
)  # fmt: skip
def test_choice_of_what_pictures_are_read_with(
    names: list[str], filename: str | None, chosen: list[str]
) -> None:
    assert choose_files("org/m", names, filename, images=True) == chosen


@pytest.mark.parametrize(
    ("names", "filename", "chosen"),
    [
        (["A-Q4_0.gguf", "mtp-A-Q8_0.gguf", "mtp-A-Q4_0.gguf"], None,
         ["A-Q4_0.gguf", "mtp-A-Q4_0.gguf"]),
        (["q/A-Q4_0.gguf", "q/B-Q4_0.gguf", "mtp-A-F16.gguf", "mtp-B-F16.gguf"],
         "q/B-Q4_0.gguf", ["q/B-Q4_0.gguf", "mtp-B-F16.gguf"]),
        ([*PARTS, *(f"mtp-{part}" for part in PARTS), "mmproj-F16.gguf"], None,
         [*PARTS, "mmproj-F16.gguf", *(f"mtp-{part}" for part in PARTS)]),
        (["A-Q4_0.gguf"], None, ["A-Q4_0.gguf"]),
        (["model.safetensors", "mtp-A-F16.gguf"], None, ["model.safetensors"]),
    ],
)  # fmt: skip
def test_choice_of_what_a_model_drafts_with(
    names: list[str], filename: str | None, chosen: list[str]
) -> None:
    """llama.cpp's converter writes `mtp-` before the name that the model would have."""
    assert choose_files("org/m", names, filename, images=True, drafts=True) == chosen
    plain = [one for one in chosen if not one.startswith(("mtp-", "mmproj"))]
    assert choose_files("org/m", names, filename) == plain


@pytest.mark.parametrize(
    ("names", "filename", "reason"),
    [
        (["A.gguf", "mtp-A.gguf"], "mtp-A.gguf",
         "is a model's draft head, which is fetched with the model, and no model itself; name the"
         " model, of A.gguf"),
        (["A.gguf", "mmproj-F16.gguf"], "mmproj-F16.gguf",
         "is a projector file, with which a model reads pictures, and no model itself; name the"
         " model, of A.gguf"),
        (["mmproj-F16.gguf"], None, "none of a model: mmproj-F16.gguf; choose the model's"),
        (["a.gguf", "b.gguf", "mmproj-F16.gguf"], None, "as org/m:FILE, of a.gguf, b.gguf"),
        (["pytorch_model.bin", "config.json"], None, "only pickled weights"),
        (["README.md"], None, "neither safetensors nor GGUF"),
        (["a.gguf", "b.gguf"], None, "several GGUF files"),
        (["a.gguf"], "c.gguf", "no GGUF file 'c.gguf'; it has a.gguf"),
        (["model.safetensors"], "c.gguf", "try org/m without a file name"),
        (PARTS[:2], None, f"org/m lacks {PARTS[2]}, one of 3 parts"),
        ([*PARTS, "b.gguf"], None, f"name one as org/m:FILE, of {PARTS[0]}, b.gguf"),
    ],
)  # fmt: skip
def test_repositories_with_nothing_to_use(
    names: list[str], filename: str | None, reason: str
) -> None:
    with pytest.raises(ModelError) as caught:
        choose_files("org/m", names, filename)
    assert reason in str(caught.value)
