"""`appliance fit` and `serve --auto` as a person calls them; tests/fit tests plans."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.models.large_model import write_large_model
from typer.testing import CliRunner

from appliance.cli import app
from appliance.commands.serve import with_best_fit
from appliance.config import EngineConfig
from appliance.docs import read
from appliance.errors import MemoryPlanError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 1 GiB in a sparse file."""
    path = tmp_path_factory.mktemp("models") / "large"
    write_large_model(path, hidden=2048, middle=6144, layers=10, vocab=4096)
    return path


def test_the_table_says_what_its_columns_mean(model: Path) -> None:
    result = CliRunner().invoke(app, ["fit", str(model), "--gpu", "RTX 3060", "--streams", "2"])
    assert result.exit_code == 0, result.exception
    first, heads, best = result.stdout.splitlines()[:3]
    assert first == "large on RTX 3060, 12 GiB"
    assert heads.split() == [
        "weights",
        "KV",
        "cache",
        "context",
        "at",
        "once",
        "memory",
        "tokens/s",
        "loss",
    ]
    assert best.split()[:5] == ["1", "as", "it", "is", "bf16"]
    assert "360 GB/s (its maker's figure)" in result.stdout


@pytest.mark.model
def test_the_table_in_the_documentation_is_what_it_prints(smollm2_gguf: Path) -> None:
    (table,) = re.findall(r"```text\n.*\n((?:.*\n)+?)```", read("sizing").text)
    result = CliRunner().invoke(app, ["fit", str(smollm2_gguf), "--gpu", "RTX 3090"])
    assert result.stdout.partition("\n")[2].startswith(table)


def test_wrong_arguments_are_one_line(model: Path, tmp_path: Path) -> None:
    for arguments, words in (
        ((str(model), "--gpu", "RTX 9"), "is in the table"),
        ((str(model), "--gpu", "L4", "--context", "4096"), "made for 2,048 tokens"),
        ((str(tmp_path),), "no model folder"),
    ):
        assert words in str(CliRunner().invoke(app, ["fit", *arguments]).exception)


def test_auto_takes_the_best_and_keeps_what_was_set(model: Path) -> None:
    config = EngineConfig(kv_cache_dtype="int4", max_num_seqs=2)
    chosen, why = with_best_fit(config, model)
    assert (chosen.kv_cache_dtype, chosen.max_model_len) == ("int4", 2048)
    assert chosen.max_num_seqs == 2
    assert why.startswith("KV cache int4-sealed, context 2,048: ")


def test_auto_refuses_what_cannot_fit(tmp_path: Path) -> None:
    write_large_model(tmp_path / "huge", hidden=32768, middle=131072, layers=8, vocab=4096)
    with pytest.raises(MemoryPlanError, match="does not fit"):
        with_best_fit(EngineConfig(), tmp_path / "huge")
