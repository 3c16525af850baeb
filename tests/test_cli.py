from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from support.runs.forked_commands import MAIN, SERVE, ForkedCommands, forked_commands
from typer.testing import CliRunner

from appliance.cli import Commands, app, main
from appliance.version import __version__

ROOT = Path(__file__).parent.parent


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["serve", "--prot", "1"], 2, "--port"),
        (["serve", "--port", "70000"], 2, "--port must be between 0 and 65535; got 70000"),
        (["serve", "--port", "high"], 2, "--port must be a whole number; got 'high'"),
        (["serve", "--kv-cache-memory", "2x"], 2, "--kv-cache-memory must be a size such as"),
        (["serve", "--kv-cache-memory", "1KiB"], 2, "between 16 KiB and 1024 TiB; got 1 KiB"),
        (["serve", "--max-queue-seconds", "soon"], 2, "a duration such as 90s or 10m"),
        (["serve", "--log-level", "loud"], 2, "one of debug, info, warning, error"),
        (["serve", "--prefix-caching", "--no-prefix-caching"], 2, "leave one out"),
        (["serve", "--kv-cache-dtype", "int3"], 2, "one of auto, fp32"),
        (["serve", "--cpu-isa", "sse2"], 2, "one of auto, amx, avx512"),
        (["serve", "--config", "/nowhere.toml"], 2, "no configuration file"),
        (["serve", "a", "--model", "b"], 2, "two models"),
        (["serve", "--min-quality", "bits<=4"], 2, "known are kld, kld-p99"),
        (["top", "--theme", "pink"], 2, "--theme must be one of dark, black, light"),
        (["top", "--config", "/nowhere.toml"], 2, "no configuration file"),
        (["evaluate", "--device", "tpu"], 2, "'tpu' is not auto, cpu or cuda"),
        (["repack", "--out", "/tmp/never"], 2, "--format"),
        (["quantize", "--fast", "--method", "gptq"], 2, "leave it or --method gptq out"),
        (["quantize", "--for", "nobody"], 2, "appliance, llama.cpp, transformers, vllm"),
        (["card", "/nowhere"], 3, "there is nothing at /nowhere"),
        (["evaluate", "--kv", "int3"], 2, "KV cache 'int3' is not known"),
        (["serv"], 2, "serve"),
    ],
)
def test_a_wrong_command_is_one_line_that_says_what_to_do(
    arguments: list[str],
    code: int,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["appliance", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    assert expected in capsys.readouterr().err


def test_help_imports_no_command_and_nothing_heavy() -> None:
    probe = (
        "import sys; sys.argv = ['appliance', '--help']\n"
        "from appliance.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'starlette', 'textual', 'transformers', 'rich', 'asyncio', 'msgspec'}\n"
        "files = {name for name in sys.modules if name.startswith('appliance.commands.')}\n"
        "print(sorted(heavy & set(sys.modules)), sorted(files))"
    )
    result = python("-c", probe)
    assert result.stdout.splitlines()[-1] == "[] []"


def test_help_names_every_command_uncut() -> None:
    text = CliRunner().invoke(app, ["--help"]).stdout
    files = {path.stem for path in (ROOT / "appliance" / "commands").glob("*.py")}
    for name, line in Commands.lines.items():
        assert f"  {name}  " in text
        assert line in text, "cut off"
        assert name.replace("-", "_") in files


def commands() -> dict[str, Any]:
    """Every command and its parameters, by the words that call it."""
    group = typer.main.get_command(app)
    found = {name: command for name, command in vars(group)["commands"].items() if name != "cache"}
    inner = vars(vars(group)["commands"]["cache"])["commands"]
    return found | {f"cache {name}": command for name, command in inner.items()}


@pytest.mark.parametrize("name", commands())
def test_help_is_whole_at_80_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(app, [*name.split(), "--help"])
    assert result.exit_code == 0
    text = result.stdout
    assert "Usage" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text, "something was cut off"
    assert not re.search(r" \.\s", text), "something was taken for markup"
    shown = [one for one in commands()[name].params if not getattr(one, "hidden", False)]
    flags = {flag for one in shown for flag in one.opts if flag.startswith("--")}
    assert flags <= set(re.findall(r"--[a-z0-9-]+", text))
    words = " ".join(text.replace("│", " ").split())
    for one in shown:
        for word in (one.help or "").split():
            assert word in words, f"{word!r} of the help of {one.name}"


def test_the_options_of_serve_stand_in_groups() -> None:
    text = CliRunner().invoke(app, ["serve", "--help"]).stdout
    titles = re.findall(r"╭─ (.+?) ─+╮", text)
    assert titles[:4] == ["Arguments", "Options", "Address and keys", "Model"]
    assert len(titles) == 9


def test_the_version_is_printed() -> None:
    for argument in ("--version", "version"):
        result = CliRunner().invoke(app, [argument])
        assert (result.exit_code, result.stdout) == (0, f"{__version__}\n")


def test_settings_can_be_read_and_begun_with() -> None:
    text = CliRunner().invoke(app, ["settings"]).stdout
    assert "| `port` | `--port` | `APPLIANCE_PORT` | 8080 |" in text
    file = tomllib.loads(CliRunner().invoke(app, ["settings", "--toml"]).stdout)
    assert file.keys() == {"server", "engine", "top"}


LIBRARY = "from appliance import LLM; LLM('/nowhere')"
SERVER = ("serve", "/nowhere")


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedCommands]:
    with forked_commands(tmp_path_factory.mktemp("commands"), (*SERVE, "appliance.llm")) as running:
        yield running


@pytest.mark.parametrize(
    ("words", "code"), [(("cache", "du"), MAIN), (SERVER, MAIN), ((), LIBRARY)]
)
def test_a_variable_that_is_no_setting_is_one_line_wherever_it_is_met(
    words: tuple[str, ...], code: str, forked: ForkedCommands
) -> None:
    result = forked.run(*words, code=code, APPLIANCE_PROT="9000")
    (line,) = (one for one in result.stderr.splitlines() if "APPLIANCE_PROT" in one)
    assert line.endswith(
        "environment variable APPLIANCE_PROT is no setting and changes nothing; "
        "did you mean APPLIANCE_PORT?"
    )
    assert "ConfigError" not in result.stderr
    went_on = result.returncode == 0 or "there is no model '/nowhere'" in result.stderr
    assert went_on, result.stderr


@pytest.mark.parametrize(("words", "code"), [(SERVER, MAIN), ((), LIBRARY)])
def test_a_variable_with_a_wrong_value_is_named(
    words: tuple[str, ...], code: str, forked: ForkedCommands
) -> None:
    last = forked.run(*words, code=code, APPLIANCE_THREADS="many").stderr.splitlines()[-1]
    assert last.endswith("APPLIANCE_THREADS must be a whole number; got 'many'")


def test_a_log_of_the_server_can_be_json(forked: ForkedCommands) -> None:
    result = forked.run(*SERVER, "--log-format", "json", APPLIANCE_PROT="9000")
    first, last = result.stderr.splitlines()
    assert json.loads(first)["level"] == "warning"
    assert last.startswith("error: there is no model '/nowhere'")


def test_a_shell_can_complete_commands() -> None:
    words = {"COMP_WORDS": "appliance ser", "COMP_CWORD": "1"}
    code = "import sys; sys.argv = ['appliance']; from appliance.__main__ import main; main()"
    result = python("-c", code, _APPLIANCE_COMPLETE="complete_bash", **words)
    assert result.stdout.split() == ["serve"]


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("serve --context 4096", "--context (Possible options: --max-model-len)"),
        ("serve --tensor-parallel-size 2", "(Possible options: --ranks)"),
        ("serve --cache-type-k q8_0", "(Possible options: --kv-cache-dtype)"),
        ("fit --max-model-len 4096", "(Possible options: --context)"),
        ("top --port 8080", "(Possible options: --url, --web-port)"),
        ("quantize --output x", "(Possible options: --out)"),
    ],
)
def test_other_programs_names_of_options_lead_to_ours(command: str, found: str) -> None:
    """Those of vLLM's and llama.cpp's help, and of commands here that call it something else."""
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 2
    assert found in " ".join(result.output.split())
