"""`appliance lora`: its list, and the result of a check."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.models.checkpoint_forms import FORMS, SHAPES, write_both
from support.models.lora import write_adapter

from appliance.commands.lora import check, ls
from appliance.errors import AdapterError, ConfigError, ModelError
from appliance.hub import resolve_adapter, resolve_adapters
from appliance.hub.resolve import choose_adapter_files

ALL = {
    f"model.layers.{layer}.{name}": shape for layer in range(2) for name, shape in SHAPES.items()
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_adapter(tmp_path / "loras" / "good", ALL, rank=3)
    write_adapter(
        tmp_path / "loras" / "dora", ALL, change=lambda config, _: config.update(use_dora=True)
    )
    return tmp_path / "loras"


def test_ls_says_what_the_settings_of_each_say(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ls(folder)
    dora, good = capsys.readouterr().out.splitlines()
    assert good == f"good  rank 3  {folder / 'good'}"
    assert dora.startswith("dora  cannot be used: ")
    assert "use_dora" in dora
    ls(folder / "good")
    assert "no adapters" in capsys.readouterr().out


def test_check_reads_it_for_a_model(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, _ = write_both(tmp_path, FORMS["awq"])
    check(str(folder / "good"), str(model.path))
    said = capsys.readouterr()
    assert "rank 3, 11,136 parameters in 14 linears (q_proj, k_proj," in said.out
    assert "AWQ by another program" in said.err
    with pytest.raises(AdapterError, match="--max-lora-rank 3"):
        check(str(folder / "good"), str(model.path), 2)
    with pytest.raises(AdapterError, match="there is no adapter at"):
        check(str(tmp_path / "none"), str(model.path))


def test_places_of_adapters(folder: Path) -> None:
    assert resolve_adapter(str(folder / "good")) == folder / "good"
    given = f"a={folder / 'good'}, b={folder / 'dora'}"
    assert resolve_adapters(given) == given.replace(", ", ",")
    assert resolve_adapters("") == ""
    with pytest.raises(ConfigError, match="twice"):
        resolve_adapters("a=x,a=y")
    names = ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "run.py"]
    assert choose_adapter_files("org/name", names, None) == names[:2]
    assert choose_adapter_files("org/name", ["a.gguf"], None) == ["a.gguf"]
    with pytest.raises(ModelError, match="has no adapter"):
        choose_adapter_files("org/name", names[2:], None)
