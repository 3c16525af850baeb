from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.runs.own_config import WriteConfig

from appliance.config import (
    SECTIONS,
    EngineConfig,
    ServerConfig,
    TopConfig,
    load_section,
    load_settings,
)
from appliance.config.reference import example_config, settings_reference
from appliance.config.setting import fields_of

README = Path(__file__).parent.parent.parent / "README.md"


def test_the_reference_has_a_row_for_every_setting() -> None:
    parts = re.split(r"^## \[(\w+)\]$", settings_reference(), flags=re.M)
    tables = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert tables.keys() == SECTIONS.keys()
    for name, section in SECTIONS.items():
        rows = [line for line in tables[name].splitlines() if line.startswith("| `")]
        assert {row.split("`")[1] for row in rows} == fields_of(section).keys()
        assert {row.count("|") for row in rows} == {6}
    for words in (
        "| `kv_cache_memory` | `--kv-cache-memory` | `APPLIANCE_KV_CACHE_MEMORY` | planned from",
        "| `max_queue_seconds` | `--max-queue-seconds` | `APPLIANCE_MAX_QUEUE_SECONDS` | 10m | L",
        "Largest body of a request. Between 1 KiB and 1 GiB. |",
        "| `api_key` |  | `APPLIANCE_API_KEY` |  |",
    ):
        assert words in settings_reference()


def test_the_example_has_every_setting_and_changes_none(write_config: WriteConfig) -> None:
    text = example_config()
    write_config(text)
    settings = load_settings({})
    assert (settings.engine, settings.server) == (EngineConfig(), ServerConfig())
    keys = re.findall(r"^# (\w+) = ", text, flags=re.M)
    every = {name for section in SECTIONS.values() for name in fields_of(section)}
    assert {*keys, "api_keys"} - {"anna"} == every
    assert "[server.api_keys]" in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_example_can_be_used_line_by_line(write_config: WriteConfig) -> None:
    text = re.sub(r"^# (?=(?!anna)\w+ = )", "", example_config(), flags=re.M)
    assert text != example_config()
    write_config(text)
    settings = load_settings({})
    assert (settings.engine, settings.server) == (EngineConfig(), ServerConfig())
    assert load_section(TopConfig, {}) == TopConfig()


EXAMPLE = """\
[server]
host = "0.0.0.0"               # other machines too; that needs a key
port = 8080
api_key_file = "~/.config/appliance/keys"   # a line NAME=KEY for each; chmod 600
max_queue_seconds = "10m"

[engine]
model = "~/models/Qwen3-4B-Q4_0.gguf"
kv_cache_memory = "4GiB"
kv_disk_size = "8GiB"
max_model_len = 16384

[top]
theme = "black"
"""


def examples() -> list[str]:
    """Every configuration that README shows, and the one proposed for it."""
    return [EXAMPLE, *re.findall(r"^```toml\n(.*?)^```", README.read_text(), flags=re.M | re.S)]


@pytest.mark.parametrize("text", examples())
def test_examples_of_the_readme_are_accepted_and_show_every_section(
    write_config: WriteConfig, text: str
) -> None:
    write_config(text)
    sections = [load_section(section, {}) for section in SECTIONS.values()]
    assert all(section != type(section)() for section in sections)
