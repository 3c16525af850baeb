"""List the benchmarks, or run the one that is named first on the command line."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

from appliance.errors import ApplianceError

# The module of each, below this package; its `main` reads the rest of the command line.
BENCHMARKS = {
    "cpu_attention": "cpu.attention",
    "cpu_experts": "cpu.experts",
    "cpu_held_types": "cpu.held_types",
    "cpu_instructions": "cpu.instructions",
    "cpu_linears": "cpu.linears",
    "cpu_models": "cpu.models",
    "cpu_quality": "cpu.quality",
    "cpu_states": "cpu.states",
    "cpu_step_shares": "cpu.step_shares",
    "adapters": "engine.adapters",
    "decode": "engine.decode",
    "eager_step": "engine.eager_step",
    "host_step": "engine.host_step",
    "pictures": "engine.pictures",
    "published_schemas": "engine.published_schemas",
    "ranks": "engine.ranks",
    "replicas": "engine.replicas",
    "scheduler": "engine.scheduler",
    "speculation": "engine.speculation",
    "structured_output": "engine.structured_output",
    "agent": "server.agent",
    "cpu_peers": "server.peers",
    "start": "server.start",
    "quantize": "quantize.methods",
    "quantize_gguf": "quantize.gguf_files",
    "quantize_peers": "quantize.peers",
    "quantize_trellis": "quantize.trellis",
    "kv_peers": "quantize.kv_peers",
    "kv_quality": "quantize.kv_quality",
    "dashboard": "tui.dashboard",
    "gpu": "gpu.command",
}


def about(name: str) -> str:
    """Return the first line of a benchmark's docstring without importing the module."""
    path = Path(__file__).parent.joinpath(*BENCHMARKS[name].split(".")).with_suffix(".py")
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def main() -> None:
    """Run a benchmark or list all of them."""
    if len(sys.argv) == 1 or sys.argv[1] in ("-h", "--help"):
        width = max(map(len, BENCHMARKS))
        print("scripts/benchmark NAME [OPTIONS]; --help after NAME lists its options\n")
        print("\n".join(f"{name:{width}}  {about(name)}" for name in BENCHMARKS))
        return
    name, *options = sys.argv[1:]
    if name not in BENCHMARKS:
        sys.exit(f"there is no benchmark {name!r}; there are {', '.join(BENCHMARKS)}")
    sys.argv = [f"scripts/benchmark {name}", *options]
    try:
        importlib.import_module(f"bench.{BENCHMARKS[name]}").main()
    except ApplianceError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
