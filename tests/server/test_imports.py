"""The server's process computes nothing, so it loads nothing that does."""

from __future__ import annotations

import subprocess
import sys

# Every file of the server, also those that are imported for the first dashboard only.
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
    assert {"appliance.server.serve", "appliance.server.admin"} <= loaded
    heavy = {"torch", "transformers", "triton", "huggingface_hub", "safetensors"}
    assert not loaded & heavy
