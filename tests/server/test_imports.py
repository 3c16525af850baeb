"""The server's process computes nothing, so it loads no library that does."""

from __future__ import annotations

import subprocess
import sys

# Every file of the server, including those that only the first dashboard imports.
PROGRAM = """
import importlib, pkgutil, sys
import appliance.commands.serve, appliance.server
for module in pkgutil.walk_packages(appliance.server.__path__, "appliance.server."):
    importlib.import_module(module.name)
print(*sys.modules)
"""


def test_the_server_s_process_loads_neither_torch_nor_transformers() -> None:
    result = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    loaded = set(result.stdout.split())
    assert {"appliance.server.api_server", "appliance.server.dashboard.admin"} <= loaded
    heavy = {"torch", "transformers", "triton", "huggingface_hub", "safetensors"}
    assert not loaded & heavy


def test_what_the_engine_waits_for_is_little() -> None:
    """The engine learns what to load before the web server and the tokenizer are imported."""
    program = (
        "import sys, appliance.commands.serve, appliance.hub.found_model\n"
        "import appliance.server.api_server; print(*sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True
    )
    loaded = set(result.stdout.split())
    late = {"uvicorn", "tokenizers", "jinja2", "numpy", "appliance.server.app"}
    engines = {"appliance.engine.process.worker", "appliance.model.spec"}
    assert "appliance.server.api_server" in loaded
    assert not loaded & (late | engines)


def test_the_engine_s_process_is_started_before_anything_is_imported() -> None:
    program = "import sys, appliance.__main__, appliance.engine.process.launch; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True
    )
    late = {"typer", "click", "msgspec", "logging", "asyncio", "appliance.config"}
    assert not set(result.stdout.split()) & late
