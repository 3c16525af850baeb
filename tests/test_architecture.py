"""The import diagram of the design, as a test: which module may import which, and file sizes."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from appliance.cli import Commands
from appliance.quant.run.options import Method

ROOT = Path(__file__).parent.parent
MAX_LINES = 700
MAX_COLUMNS = 100  # in C files; ruff checks Python's
C_FOLDERS = {
    ROOT / "kernels" / "cpu" / "src",
    ROOT / "tests" / "kernels" / "cpu",
    ROOT / "tests" / "support" / "support" / "kernels" / "stub_cuda",  # a driver without a GPU
    ROOT / "scripts" / "bench" / "cpu",  # a program small enough for its instructions to be counted
}
LARGE_BY_NATURE: set[str] = set()  # kernel and generated files, by name only

LEAVES = {
    "version", "runtime", "errors", "stats", "progress.stages", "events", "files",
    "model_files.gguf_names", "progress.quantize_events", "model_files.rankers", "wording",
    "long_lived", "model_files.other_forms", "isolated_worker", "model_files.files_beside",
}  # fmt: skip
# The longest matching prefix applies. A value lists what else of ours the unit may import; every
# unit may import itself and the leaves.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "stats": set(),
    "runtime": set(),
    "version": set(),
    "events": set(),
    "files": set(),
    "wording": set(),
    "long_lived": set(),
    "isolated_worker": set(),
    "config": set(),
    "model_files": {"kernels.arrays"},
    "model_files.retrieval_recipe": {
        "engine.nouns.request", "model_files.checkpoint", "gguf", "kernels.weights",
    },
    "text": {"engine.nouns", "engine.grammars", "tokenizer"},
    "pictures": {"engine.nouns", "tokenizer", "media", "dialects"},
    "log": set(),
    "gguf": {"kernels.arrays", "kernels.weights"},
    "grammar": set(),
    "tokenizer": {
        "gguf", "model_files.sampling_defaults", "model_files.retrieval_recipe", "dialects",
        "grammar",
    },
    "dialects": {"grammar"},
    "media": {"gguf"},
    "hub": {"config", "progress", "model_files.sampling_defaults"},
    "hub.found_model": {"config", "hub", "tokenizer"},
    "kernels": set(),
    # The lower floor of quant: how weights are stored. Models read it, so it knows no model.
    "quant.formats": {"kernels", "model_files.checkpoint"},
    "quant.methods.rtn": {"kernels", "quant.formats"},
    # A program of its own, the only part of quant that runs an engine.
    "quant.text.answerer": {
        "llm", "engine.nouns.sampling_params", "model", "quant.run.memory",
    },
    "quant": {
        "kernels", "model", "model_files.checkpoint", "gguf", "tokenizer", "hub", "config",
        "model_files.sampling_defaults", "model_files.retrieval_recipe", "dialects", "media",
    },
    "model": {"kernels", "quant.formats", "model_files.checkpoint", "gguf"},
    "model.narrowed": {"kernels", "quant.formats", "quant.methods.rtn", "model"},
    "engine": {
        "model", "kernels", "model_files.checkpoint", "gguf", "config", "log", "grammar", "media",
    },
    # Beyond one machine, and the only room that knows Ray.
    "cluster": {"config", "engine", "hub", "log", "server"},
    "server": {
        "engine", "config", "tokenizer", "text", "pictures", "log", "progress.jobs",
        "model_files.sampling_defaults", "docs", "dialects", "grammar",
        "model_files.retrieval_recipe", "service", "kernels.gpu.cards", "media",
    },
    "tui": set(),
    "progress": set(),
    "monitoring": set(),
    "docs": set(),
    "connect": set(),
    "chat": {"config", "tui.server", "tui.sse"},
    "bench": set(),
    "service": {"config"},
    "fit": {
        "bench", "config", "engine.devices", "engine.memory.plan", "engine.load.memory_request",
        "engine.memory.experts", "engine.memory.known_gpus", "engine.encoder.encoder_execution",
        "engine.served_model", "gguf", "hub", "model", "tokenizer", "kernels.activation",
    },
    "doctor": {
        "config", "hub", "progress", "kernels.cpu", "kernels.gpu", "kernels.packed_matmul",
        "model.source", "model.encoder", "model.leftovers", "model.families", "engine.memory.plan",
        "engine.encoder.encoder_execution", "engine.load.memory_request", "engine.load.tuning",
        "engine.load.pictures", "engine.served_model", "model_files.retrieval_recipe",
        "engine.nouns.sampling_params", "quant.quality.card",
        "server.metrics.gpu", "server.http.listener", "tui.server", "model_files.checkpoint",
        "gguf", "tokenizer", "llm",
    },
    "llm": {
        "engine", "tokenizer", "text", "pictures", "media", "dialects", "config", "hub",
        "model_files.sampling_defaults",
    },
    "commands": {
        "config", "log", "progress", "server", "engine", "quant", "tui", "hub",
        "monitoring", "model_files.sampling_defaults", "docs", "doctor", "connect", "chat", "bench",
        "service", "fit", "model.adapters", "model.source", "cluster", "model_files.checkpoint",
        "kernels.gpu.cards",
    },
    "cli": {"commands", "config", "engine.process.launch"},
    "__init__": {"llm", "engine.nouns.sampling_params", "grammar"},
    "__main__": {"cli", "engine.process.launch"},
}  # fmt: skip

# The folders of a unit and the files beside them, lowest first: each may import itself and those
# before it, also lazily and for types, so that no cycle spans two.
ROOMS = {
    "engine": [
        "nouns", "blocks", "tiers", "scheduling", "grammars", "speculation", "run", "devices",
        "served_model", "packed_models", "memory", "ranks", "encoder", "engine", "load", "process",
    ],
    "server": [
        "metrics", "http", "models", "requests", "openai", "retrieval", "openai_responses",
        "anthropic", "ollama", "own_model", "dashboard", "health", "app", "web_server",
        "api_server",
    ],
}  # fmt: skip

# These run while the package is built, when only setuptools is installed.
BUILD_TIME = ["kernels.cpu.build", "kernels.cpu.build_command"]

# Modules that are started, or that a client imports; all others are reached from these, or only by
# tests.
DOORS = {
    "__init__", "__main__", "engine.process.__main__", "engine.ranks.__main__",
    "hub.__main__",
    "quant.text.answerer",
    *BUILD_TIME,
    *(f"commands.{name.replace('-', '_')}" for name in Commands.lines),
    *(f"quant.methods.{method.traits.file}" for method in Method if method.traits.file),
}  # fmt: skip

NO_TORCH = [
    "engine.nouns.request", "engine.nouns.sequence", "engine.blocks.block_manager",
    "engine.blocks.prefix_cache", "engine.tiers.tiers", "engine.scheduling.scheduler",
    "engine.speculation.speculator", "engine.nouns.messages", "engine.engine",
    "engine.process.router", "model.spec",
    "errors", "stats", "events", "config", "api_keys", "kernels.cpu.library", "quantize_events",
]  # fmt: skip


@cache
def modules() -> dict[str, Path]:
    """All our modules, by their names below `appliance`."""
    found: dict[str, Path] = {}
    for folder in (ROOT / "appliance", ROOT / "kernels", ROOT / "quant", ROOT / "tui"):
        base = folder if folder.name == "appliance" else ROOT
        for path in sorted(folder.rglob("*.py")):
            if base is folder and path.relative_to(folder).parts[0] in {"kernels", "quant", "tui"}:
                continue  # the symlinks
            name = ".".join(path.relative_to(base).with_suffix("").parts)
            found[name.removesuffix(".__init__") or "__init__"] = path
    return found


def roots_of_imports(path: Path) -> set[str]:
    """The packages that a file imports, at any depth of its code."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


@cache
def imports_of(path: Path) -> set[str]:
    """Names below `appliance` that a file imports, at any depth of its code."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("appliance.") for name in names if name.startswith("appliance.")}


def within(name: str, unit: str) -> bool:
    return name == unit or name.startswith(unit + ".")


def unit_of(name: str) -> str:
    candidates = [unit for unit in MAY_IMPORT if within(name, unit)]
    assert candidates, f"{name} is not in the table of who may import whom"
    return max(candidates, key=len)


def test_imports_follow_the_diagram() -> None:
    wrong = []
    for name, path in modules().items():
        unit = unit_of(name)
        allowed = MAY_IMPORT[unit] | LEAVES | {unit}
        wrong += [
            f"{name} may not import {imported}"
            for imported in imports_of(path)
            if not any(within(imported, target) for target in allowed)
        ]
    assert not wrong


def test_every_module_is_reached_from_a_door() -> None:
    """References are exempt: they define what a kernel computes."""
    reached: set[str] = set()
    waiting = {*DOORS}
    while waiting:
        name = waiting.pop()
        reached.add(name)
        imported = {part for whole in imports_of(modules()[name]) for part in lineage(whole)}
        waiting |= (imported | set(lineage(name))) & modules().keys() - reached
    unreached = {name for name in modules().keys() - reached if not name.endswith(".reference")}
    assert not unreached


def lineage(name: str) -> list[str]:
    """A name and the packages that contain it."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


@pytest.mark.parametrize("unit", ROOMS)
def test_rooms_import_only_downwards(unit: str) -> None:
    def room(name: str) -> int:
        return ROOMS[unit].index(name.split(".")[1])

    wrong = [
        f"{name} may not import {imported}"
        for name in modules()
        if name.startswith(f"{unit}.")
        for imported in imports_of(modules()[name])
        if imported.startswith(f"{unit}.") and room(imported) > room(name)
    ]
    assert not wrong


@pytest.mark.parametrize("unit", ROOMS)
def test_rooms_are_what_the_folder_shows(unit: str) -> None:
    rooms = {name.split(".")[1] for name in modules() if name.startswith(f"{unit}.")}
    assert rooms == {*ROOMS[unit]}


def test_files_stay_small() -> None:
    lines = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    large = {name for name, count in lines.items() if count > MAX_LINES}
    assert large == LARGE_BY_NATURE


def c_files() -> list[Path]:
    """Every file of C or C++ in the folders that hold code."""
    folders = ("appliance", "kernels", "quant", "tui", "tests", "scripts")
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*.[chCH]*"))
    endings = {".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu", ".cuh"}
    return sorted({path.resolve() for path in paths if path.suffix in endings})


def test_c_stays_with_the_cpu_library() -> None:
    assert c_files()
    assert {path.parent for path in c_files()} <= C_FOLDERS


def test_files_of_c_stay_small() -> None:
    wrong = []
    for path in c_files():
        lines = path.read_text().splitlines()
        wrong += [f"{path.name} has {len(lines)} lines"] if len(lines) > MAX_LINES else []
        wrong += [
            f"{path.name}:{number} has {len(line)} columns"
            for number, line in enumerate(lines, 1)
            if len(line) > MAX_COLUMNS
        ]
    assert not wrong


@pytest.mark.parametrize("name", BUILD_TIME)
def test_the_package_is_built_with_nothing_but_setuptools(name: str) -> None:
    imported = roots_of_imports(modules()[name])
    assert imported
    assert imported <= {*sys.stdlib_module_names, "setuptools"}


def loaded_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(' '.join(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(result.stdout.split())


def test_what_needs_no_torch_loads_none() -> None:
    present = [name for name in NO_TORCH if name in modules()]
    assert present
    loaded = loaded_after("\n".join(f"import appliance.{name}" for name in present))
    assert "torch" not in loaded


def test_the_server_loads_nothing_that_is_large_and_not_needed() -> None:
    loaded = loaded_after(
        "import appliance.server.app, appliance.server.api_server, appliance.hub\n"
        "import appliance.engine.blocks.block_metadata, appliance.engine.process.worker"
    )
    large = {"torch", "transformers", "triton", "numpy", "gguf", "safetensors", "huggingface_hub"}
    large.add("PIL")
    assert loaded.isdisjoint(large | {"httpx", "rich", "textual", "appliance.engine.engine"})


def test_the_dashboard_loads_neither_torch_nor_the_engine() -> None:
    loaded = loaded_after("import appliance.tui.run")
    assert "torch" not in loaded
    assert not any(name.startswith("appliance.engine") for name in loaded)


def test_the_ptx_machine_knows_nothing_of_the_product() -> None:
    files = list((ROOT / "tests" / "ptx_machine").rglob("*.py"))
    assert len(files) > 10
    imported = {name for path in files for name in roots_of_imports(path)}
    ours = imported - sys.stdlib_module_names - {"numpy", "torch", "triton", "pytest"}
    assert ours == {"ptx_machine"}


def test_triton_is_imported_in_kernel_files_only() -> None:
    wrong = [
        name
        for name, path in modules().items()
        if "import triton" in path.read_text()
        and not (
            name.startswith("kernels.device.")
            or (
                name.startswith("kernels.")
                and name.endswith(("kernel", ".target", ".compile_ahead", ".direct_launch"))
            )
        )
    ]
    assert not wrong


def test_nothing_is_packed_to_save_lines() -> None:
    """`*(a, b)` in a call or a list is such packing, which hides what is passed."""
    folders = ("appliance", "kernels", "quant", "tui", "scripts", "tests")
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in paths
        if "*(" in (text := path.read_text()) or "*[" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Starred)
        and isinstance(node.value, ast.Tuple | ast.List)
        and node.value.elts
        and isinstance(node.ctx, ast.Load)
    ]
    assert not wrong
