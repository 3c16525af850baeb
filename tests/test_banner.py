"""The commands that a server prints for pasting are valid in a shell."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from appliance import commands
from appliance import config as configuration
from appliance.commands.serve_banner import ExampleRequest, banner, own_command, parting, try_it
from appliance.config import EngineConfig
from appliance.engine.nouns.messages import EngineInfo
from appliance.model_files.sampling_defaults import NOTHING_RECOMMENDED, SamplingDefaults

INFO = EngineInfo(
    model="m", architecture="llama", device="CPU", backend="cpu",
    weight_format="4 bits (groups of 32), head 8 bits", kv_format="int8", context_length=64,
    vocab_size=50, eos_token_ids=(), block_size=16, num_blocks=4, max_num_seqs=1, weight_bytes=1,
    kv_bytes=1, workspace_bytes=1, memory_bytes=1, load_seconds=0.1, fingerprint="",
)  # fmt: skip
CARD = SamplingDefaults({"temperature": 0.2, "top_p": 0.9}, "the model's card")


def row(label: str, info: EngineInfo = INFO, **options: Any) -> str:
    """The text after a label of the banner."""
    lines = banner("http://127.0.0.1:9", "it's a <model>", info, **options).splitlines()
    (text,) = [line[13:] for line in lines if line[2:12].strip() == label]
    return text


def body_of(curl: str) -> tuple[str, dict[str, Any]]:
    """The URL that a curl command requests, and its body."""
    words = shlex.split(curl)
    assert words[0] == "curl"
    body: dict[str, Any] = json.loads(words[words.index("-d") + 1])
    return words[1], body


def test_a_model_that_chats_is_shown_with_a_chat() -> None:
    url, body = body_of(row("try it", sampling=CARD))
    assert url == "http://127.0.0.1:9/v1/chat/completions"
    assert body["model"] == "it's a <model>"
    assert body["messages"][0]["role"] == "user"
    assert "temperature" not in body, "the recommended one counts"
    assert "chat" in row("page")


def test_a_model_that_does_not_is_shown_with_a_text_to_continue() -> None:
    url, body = body_of(row("try it", chats=False))
    assert url == "http://127.0.0.1:9/v1/completions"
    assert body["prompt"]
    assert "messages" not in body
    assert 0 < body["temperature"] < 1, "nothing else keeps a small model from rambling"
    assert "chat" not in row("page", chats=False)


def test_a_key_is_taken_from_the_environment_and_never_printed() -> None:
    line = row("try it", keys=["anna"])
    assert '-H "Authorization: Bearer $APPLIANCE_API_KEY"' in line
    assert "Authorization" not in row("try it")
    assert row("keys", keys=["anna", "ben"]).startswith("anna, ben; ")
    assert "=" not in row("dashboard", keys=["anna"]), "it runs as it is, with the variable set"


def test_an_address_that_a_shell_would_expand_is_quoted() -> None:
    line = try_it("http://[::1]:9", "m", NOTHING_RECOMMENDED, use=ExampleRequest.CHAT, keyed=False)
    assert "'http://[::1]:9/v1/chat/completions'" in line


def test_what_drafts_is_said_and_its_memory_counted() -> None:
    mib = 2**20
    parts: dict[str, Any] = dict.fromkeys(("weight_bytes", "kv_bytes", "workspace_bytes"), mib)
    what = "the EAGLE-3 head h: 1 layer, 4.0 MiB"
    info = msgspec.structs.replace(INFO, **parts, drafts=what, draft_bytes=70 * mib)
    assert row("drafts", info) == what
    said = row("memory", info)
    assert said.startswith(
        "73 MiB once the KV cache is full: weights 1 + KV cache 1 + drafts 70 + "
    )
    assert "drafts" not in row("memory")


def test_sampling_and_weights_are_said_in_words() -> None:
    said = row("sampling", sampling=CARD)
    assert said.startswith("temperature 0.2, top_p 0.9, from the model's card; ")
    assert row("sampling").startswith("temperature 1, ")
    assert "; weights 4 bits (groups of 32), head 8 bits; on CPU" in row("model")


@pytest.mark.parametrize(
    ("ranks", "path", "field"),
    [(False, "/v1/embeddings", "input"), (True, "/v1/rerank", "documents")],
)
def test_an_encoder_is_asked_for_what_it_does(ranks: bool, path: str, field: str) -> None:
    info = msgspec.structs.replace(INFO, num_blocks=0, kv_bytes=0, ranks_pairs=ranks)
    text = banner("http://127.0.0.1:9", "m", info)
    asked, body = body_of(text.rpartition("  try it     ")[2])
    assert asked.endswith(path)
    assert body[field]
    assert "temperature" not in body
    assert "of up to 64 tokens; no KV cache" in text
    assert "sampling" not in text
    assert "/ with" not in text


def test_experts_are_counted() -> None:
    info = msgspec.structs.replace(INFO, num_experts=128, experts_per_token=8)
    lines = banner("http://127.0.0.1:9", "m", info).splitlines()
    assert any("m, llama of 128 experts, 8 for each token; weights" in line for line in lines)


def program(folder: Path) -> Path:
    path = folder / "bin" / "appliance"
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\necho ran $*\n")
    path.chmod(0o755)
    return path


def said_elsewhere(arguments: str) -> str:
    """What a shell in another folder, with a plain PATH, makes of our command."""
    command = f"{own_command()} {arguments}"
    shell = ["/bin/sh", "-c", command]
    return subprocess.run(
        shell, capture_output=True, text=True, cwd="/", env={"PATH": "/usr/bin:/bin"}, check=True
    ).stdout


def test_the_command_runs_from_any_folder_though_it_was_called_by_a_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "it's here")
    monkeypatch.chdir(tmp_path / "it's here")
    monkeypatch.setattr(sys, "argv", ["bin/appliance", "serve"])
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert said_elsewhere("top --url x") == "ran top --url x\n"


def test_on_the_path_its_name_is_enough_unless_an_activated_environment_put_it_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = program(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path), "serve"])
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
    assert own_command() == "appliance"
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert own_command() == str(path)
    other = program(tmp_path / "other")
    monkeypatch.setenv("PATH", f"{other.parent}:/usr/bin:/bin")
    assert own_command() == str(path), "another one is on the PATH"


def test_called_as_a_module_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(Path(commands.__file__).parents[1] / "__main__.py")])
    command = [*shlex.split(own_command()), "version"]
    assert command[1:3] == ["-m", "appliance"]
    assert subprocess.run(command, capture_output=True, check=True).stdout.strip()


def test_a_server_that_stopped_says_what_it_did_and_what_it_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configuration, "kv_dir", lambda: tmp_path / "usual")
    nothing = "nothing is kept on disk"
    assert parting(1, EngineConfig(kv_disk="off")) == f"stopped; 1 request served; {nothing}"
    for folder in ("usual", "an other"):
        config = EngineConfig(kv_disk=str(tmp_path / folder))
        assert parting(1200, config) == f"stopped; 1,200 requests served; {nothing}"
        model = tmp_path / folder / ("0" * 32)
        model.mkdir(parents=True)
        (model / f"{'1' * 32}.kv").write_bytes(bytes(3 * 2**19))
        said = parting(0, config)
        assert f"1.5 MiB of prompts and answers are kept in {tmp_path / folder} " in said
        listing = shlex.split(said[said.index("(") + 1 : -1])
        options = [] if folder == "usual" else ["--kv-disk", str(tmp_path / folder)]
        assert listing[-2 - len(options) :] == ["cache", "ls", *options]


def test_a_model_with_recurrent_layers_says_what_its_states_take() -> None:
    info = msgspec.structs.replace(INFO, state_bytes=30 << 20, num_checkpoints=4)
    text = banner("http://127.0.0.1:9", "m", info)
    assert "1 slot for sequences and 4 checkpoints, 6.0 MiB each" in text
    assert "+ states 30 +" in text
    assert "states" not in banner("http://127.0.0.1:9", "m", INFO)


def test_further_models_are_named() -> None:
    text = banner("http://127.0.0.1:9", "m", INFO, others=("a", "b"))
    assert "models     a, b: loaded when a request names them" in text


def test_lines_are_broken_within_a_terminal_but_for_those_that_are_copied() -> None:
    info = msgspec.structs.replace(INFO, notes=("a note of many words " * 9,))
    wide = banner("http://127.0.0.1:8080", "m", info).splitlines()
    narrow = banner("http://127.0.0.1:8080", "m", info, columns=60).splitlines()
    copied = [line for line in wide if line.split()[0] in ("endpoint", "dashboard", "try")]
    assert copied == [line for line in narrow if line in copied]
    others = [line for line in narrow if line not in copied]
    assert max(map(len, others)) <= 60
    assert " ".join(" ".join(wide).split()) == " ".join(" ".join(narrow).split())
    assert any(line.startswith(" " * 13) for line in others)
