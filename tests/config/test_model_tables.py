"""Tables of models: their inheritance, their order, and those that are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from appliance.config import Settings, load_settings
from appliance.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

TABLES = """
[engine]
kv_cache_dtype = "int8"
threads = 2

[models.small]
model = "org/small@v1"
max_model_len = 1024

[models.coder]
kv_cache_dtype = "int4"

[aliases]
gpt-4o = "coder"
"""


def load(path: Path, text: str = TABLES, **flags: object) -> Settings:
    path = path / "config.toml"
    path.write_text(text)
    return load_settings(flags, path)


def test_a_model_has_its_own_settings_over_the_common_ones_and_flags_over_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APPLIANCE_THREADS", "3")
    settings = load(tmp_path, max_num_seqs="4")
    small, coder = settings.served
    assert (small.name, small.engine.model, small.engine.max_model_len) == (
        "small",
        "org/small@v1",
        1024,
    )
    assert (coder.name, coder.engine.model, coder.engine.max_model_len) == ("coder", "coder", None)
    assert [one.engine.kv_cache_dtype for one in (small, coder)] == ["int8", "int4"]
    assert {(one.engine.threads, one.engine.max_num_seqs) for one in (small, coder)} == {(3, 4)}
    assert settings.aliases == {"gpt-4o": "coder"}


@pytest.mark.parametrize(
    ("asked", "served"),
    [
        ("coder", ["coder", "small"]),
        ("gpt-4o", ["coder", "small"]),
        ("org/other", [None]),
        (None, ["small", "coder"]),
    ],
)
def test_the_model_of_the_command_line_is_first_or_alone(
    tmp_path: Path, asked: str | None, served: list[str | None]
) -> None:
    assert [one.name for one in load(tmp_path, model=asked).served] == served


def test_without_tables_there_is_one_model_as_before(tmp_path: Path) -> None:
    settings = load(tmp_path, '[engine]\nmodel = "a"\n[server]\nserved_model_name = "b"\n')
    (only,) = settings.served
    assert (only.name, only.engine) == ("b", settings.engine)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[models.a]\n[aliases]\nb = "aa"', "aliases.b names 'aa', which is no model; .*'a'"),
        ('[models.a]\n[models.b]\n[aliases]\nb = "a"', "aliases.b is the name of a model"),
        ("[models.a]\n[models.A]", "two models have the name 'a'"),
        ("[models.a]\n[models.a]", "not valid TOML"),
        ("[models.a]\nkv_cache_dtyp = 1", r"'kv_cache_dtyp' in \[models.a\]; .*kv_cache_dtype"),
        ("[models.a]\nthreads = 0", "models.a.threads must be between 1"),
        ("[models.a]\nmax_num_seqs = 99\nmax_num_batched_tokens = 16", "models.a.max_num_batched"),
        ("models = 3", r"models must be tables"),
        ("[models]\na = 3", r"models.a must be a table"),
        ("aliases = 3", "aliases must be a table"),
        ("[models.a]\n[aliases]\nb = 3", 'a line ALIAS = "NAME"'),
        ('[models." a"]', "a name has letters"),
        ('[models.a]\n[engine]\nmodel = "b"', "names a model beside"),
        ('[models.a]\n[server]\nserved_model_name = "b"', "served_model_name names one model"),
        ("[model.a]", r"unknown section \[model\]; did you mean 'models'"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(tmp_path, text)
