"""Kernels are executed here with no GPU, in two ways.

"interpreter": Triton's interpreter runs their source. Triton decides when it is imported whether it
compiles or interprets, and a process that interprets cannot compile: so this process collects the
tests, a child pytest runs all those that were selected, and every test here passes or fails as it
did there. Fixtures are set up in both. The child computes in the background while other tests run
here; in a parallel run, where others compute already, from the moment that the first of its tests
comes up in one of the workers.

"sm_86" and so on: `ptx_machine` runs the PTX that they are compiled to for that architecture, in
this process. Some cases of each test are, one after another on another architecture, and these are
not interpreted as well: what their source says is in what it was compiled to. A test marked
`interpreted` has none, as others execute what its kernels are compiled to. With `--every-target`
all cases are, and all are interpreted.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from ptx_machine.driver import TARGETS
from support.kernels.kernel_gpu import gpu

from appliance.kernels.cache.kv_cache import KVPages
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.kv_page.layout import record_offset
from appliance.kernels.kv_write.reference import write_kv
from appliance.kernels.rows.ragged import RaggedBatch

HERE = Path(__file__).parent
INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
INTERPRETER = "interpreter"
SHARE = 5  # of so many cases of a test, the first is executed on one of those
CHILD_TIMEOUT = 1500  # seconds, for all tests of this folder
CHILD = pytest.StashKey["Child"]()


class Child:
    """A pytest that runs in the background."""

    def __init__(self, session: pytest.Session) -> None:
        tests = [item.nodeid for item in session.items if target_of_item(item) == INTERPRETER]
        path = os.pathsep.join(filter(None, (str(HERE / "plugins"), os.environ.get("PYTHONPATH"))))
        self._folder = tempfile.TemporaryDirectory()
        self._lines = Path(self._folder.name) / "outcomes.jsonl"
        self._output = Path(self._folder.name) / "output.txt"
        self._lines.touch()
        self._ended: dict[str, dict[str, str]] | None = None
        options = [f"--outcome-lines={self._lines}", "-q"]
        for plugin in ("interpreter_arithmetic", "outcome_lines", "no:cacheprovider"):
            options += ["-p", plugin]
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, *tests],
                env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
                cwd=session.config.rootpath,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def outcomes(self) -> dict[str, dict[str, str]]:
        """What became of each test, by its id; waits for the last one."""
        if self._ended is None:
            try:
                self._process.wait(CHILD_TIMEOUT)
            except subprocess.TimeoutExpired:
                self.end()
            lines = [json.loads(line) for line in self._lines.read_text().splitlines()]
            self._ended = {line["test"]: line for line in lines}
        return self._ended

    def output(self) -> str:
        """What it printed."""
        return self._output.read_text(errors="replace")

    def end(self) -> None:
        """Stop it if it still runs."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Let go of everything."""
        self.end()
        self._folder.cleanup()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("target", (INTERPRETER, *TARGETS), indirect=True, scope="function")


@cache
def _is_here(path: Path) -> bool:
    return path.is_relative_to(HERE)


def target_of_item(item: pytest.Item) -> str | None:
    """Where a test of this folder is executed; None for others."""
    if not _is_here(item.path):
        return None
    assert isinstance(item, pytest.Function)
    target = item.callspec.params["target"]
    assert isinstance(target, str)
    return target


def pytest_collection_finish(session: pytest.Session) -> None:
    chosen = any(target_of_item(item) == INTERPRETER for item in session.items)
    in_parallel = hasattr(session.config, "workerinput")
    if chosen and not (INTERPRETS or in_parallel or session.config.option.collectonly):
        session.stash[CHILD] = Child(session)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if CHILD in session.stash:
        session.stash[CHILD].close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave a share of what is compiled; the first test that is interpreted waits for all."""
    cases: dict[tuple[Path, str], dict[str, list[pytest.Item]]] = {}
    interpreted: dict[tuple[Path, str, str], pytest.Item] = {}
    left_out: set[pytest.Item] = set()
    for item in items:
        target = target_of_item(item)
        if target == INTERPRETER and not INTERPRETS:
            item.add_marker(pytest.mark.timeout(CHILD_TIMEOUT + 60))
            item.add_marker(pytest.mark.slow)
        if target is None:
            continue
        assert isinstance(item, pytest.Function)
        case = item.callspec.id.replace(target, "")
        if target in TARGETS:
            left_out.add(item)
            of_test = cases.setdefault((item.path, item.originalname), {})
            least = item.get_closest_marker("least_capability")
            only = item.get_closest_marker("capabilities")
            is_new = least is None or TARGETS[target] >= least.args[0]
            if is_new and (only is None or TARGETS[target] in only.args):
                of_test.setdefault(case, []).append(item)
        elif item.get_closest_marker("compiled"):
            left_out.add(item)
        else:
            interpreted[item.path, item.originalname, case] = item
    kept: set[pytest.Item] = set()
    for number, (test, of_test) in enumerate(cases.items()):
        for i, (case, on_targets) in enumerate(of_test.items()):
            if config.getoption("--every-target"):
                kept.update(on_targets)
            elif i % SHARE == 0 and not on_targets[0].get_closest_marker("interpreted"):
                kept.add(on_targets[(number + i // SHARE) % len(on_targets)])
                left_out.update(filter(None, [interpreted.get((*test, case))]))
    items[:] = [item for item in items if item in kept or item not in left_out]


@pytest.fixture(autouse=True)
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    """What kernels are executed by."""
    name: str = request.param
    if name == INTERPRETER:
        yield name
        return
    with gpu(TARGETS[name]):
        yield name


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if INTERPRETS or target_of_item(pyfuncitem) != INTERPRETER:
        return None
    stash = pyfuncitem.session.stash
    if CHILD not in stash:
        stash[CHILD] = Child(pyfuncitem.session)
    child = stash[CHILD]
    result = child.outcomes().get(pyfuncitem.nodeid)
    if result is None:
        pytest.fail(f"the child did not run this test; it said:\n{child.output()}", pytrace=False)
    if result["outcome"] == "failed":
        pytest.fail(result["text"], pytrace=False)
    if result["outcome"] == "skipped":
        pytest.skip(result["text"])
    return True


@pytest.fixture(autouse=True)
def _uninitialized_memory_is_nan() -> Iterator[None]:
    """So that what a kernel reads before it was written, or never writes, is seen."""
    torch.set_deterministic_debug_mode("error")  # unlike its older name, it loads no compiler
    yield
    torch.set_deterministic_debug_mode("default")


def fill_with_nan(cache: KVPages) -> None:
    """Make every number of a cache's pages NaN: its elements, or the scales of its codes."""
    if cache.format.is_quantized:
        records = cache.pages[..., record_offset(cache.layout, cache.head_dim) :]
        records.copy_(torch.full(records.shape, 0xFF, dtype=torch.uint8))  # NaN in every half
    else:
        cache.elements.fill_(torch.nan)


@dataclass(frozen=True)
class Case:
    """A step of ragged sequences over a cache that is NaN wherever they hold no token."""

    query: torch.Tensor  # (num_tokens, num_heads, head_dim)
    cache: KVPages
    batch: RaggedBatch


MakeCase = Callable[..., Case]


@pytest.fixture(scope="session")
def make_case() -> MakeCase:
    return build_case


def build_case(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    num_heads: int = 3,
    num_kv_heads: int = 1,
    head_dim: int = 32,
    kv_format: KVFormat = KVFormat.FP16,
    dtype: torch.dtype = torch.float16,
    block_size: int = 32,
    blocks_seed: int = 0,
    value_sizes: torch.Tensor | None = None,
    decode_rows: int = 1,
) -> Case:
    """Random queries and keys, the same ones wherever the blocks lie."""
    lengths = [-(-context // block_size) for context in context_lens]
    num_blocks = sum(lengths) + 3
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(blocks_seed))
    tables = [tuple(table.tolist()) for table in order[: sum(lengths)].split(lengths)]
    cache = KVPages.allocate(
        kv_format,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        device=torch.device("cpu"),
    )
    if cache.head_scales is not None:
        cache.head_scales.copy_(torch.linspace(0.5, 2, cache.head_scales.numel()).view(2, -1))
    fill_with_nan(cache)
    queries = []
    for i, (rows, context, table) in enumerate(zip(query_lens, context_lens, tables, strict=True)):
        random = torch.Generator().manual_seed(i)
        shape = (context, num_heads + 2 * num_kv_heads, head_dim)
        parts = torch.randn(shape, generator=random).to(dtype)
        query, key, value = parts.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        if value_sizes is not None:
            value = value * value_sizes[:context]
        write_kv(key, value, cache, slots_of(table, 0, context, block_size))
        queries.append(query[context - rows :])
    return Case(
        torch.cat(queries),
        cache,
        build_batch(query_lens, context_lens, tables, block_size, decode_rows),
    )


def build_batch(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    tables: Sequence[tuple[int, ...]],
    block_size: int,
    decode_rows: int = 1,
) -> RaggedBatch:
    width = max(map(len, tables))
    return RaggedBatch(
        query_start=torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32),
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        block_tables=torch.tensor(
            [table + (0,) * (width - len(table)) for table in tables], dtype=torch.int32
        ),
        slot_mapping=torch.cat(
            [
                slots_of(table, context - rows, context, block_size)
                for rows, context, table in zip(query_lens, context_lens, tables, strict=True)
            ]
        ),
        num_decodes=len(list(itertools.takewhile(lambda rows: rows <= decode_rows, query_lens))),
        host_query_lens=tuple(query_lens),
        host_context_lens=tuple(context_lens),
        decode_rows=decode_rows,
    )


def slots_of(table: tuple[int, ...], start: int, stop: int, block_size: int) -> torch.Tensor:
    positions = torch.arange(start, stop)
    return torch.tensor(table)[positions // block_size] * block_size + positions % block_size
