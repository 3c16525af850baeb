"""Fixtures that several test folders share, and the order of a run on several processors."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from support.runs import sweeps

from appliance.kernels.gpu.cards import has_driver
from appliance.runtime import limit_spinning

# Tests start scripts in tests/support, which import the modules beside them.
_SUPPORT = str(Path(__file__).parent / "support")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_SUPPORT, os.getenv("PYTHONPATH"))))
# What a shell starts in the background ignores SIGINT, which servers under test would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
limit_spinning()  # the tests share their processors with servers under test
if "PYTEST_XDIST_WORKER" in os.environ:
    # There is a worker for each processor, where torch's threads would wait for those of others.
    # Set here, before a folder's conftest imports torch.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# No example is too slow: the machine may be busy with other work.
settings.register_profile(
    "here", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("here")

_DEFAULT_MODELS_DIR = Path(__file__).parent.parent / ".cache" / "models"


def _model_file(name: str) -> Path:
    path = Path(os.environ.get("APPLIANCE_MODELS_DIR", _DEFAULT_MODELS_DIR)) / name
    if not path.is_file():
        pytest.fail(f"{path} is missing; scripts/test fetches it")
    return path


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-target",
        action="store_true",
        help="execute every case of the kernels' tests as compiled for every architecture",
    )
    parser.addoption(
        "--sweeps",
        choices=("all", "changed", "by-turns"),
        default="all",
        help="of the tests that try every case of something: all; those of changed code, whose "
        "passing is written down; or those and a sample of the others, another one in each commit",
    )
    parser.addoption(
        "--unlike-products",
        action="store_true",
        help="let torch's products differ with their shapes in a last bit, as on other processors",
    )

    parser.addoption(
        "--header-cases",
        type=int,
        default=200,
        help="hostile settings of models that the sanitizers' test makes up",
    )
    parser.addoption(
        "--store-durations",
        action="store_true",
        help="write down what each unit of a parallel run took, by which the next begin",
    )
    parser.addoption("--header-seed", type=int, default=0, help="a number that chooses which ones")


def pytest_configure(config: pytest.Config) -> None:
    if isa := os.environ.get("APPLIANCE_CPU_ISA"):  # also for engines in this process
        from support.kernels.faces import leave_out

        leave_out(isa)
    if not hasattr(config, "workerinput"):
        sweeps.check_selection(config)
        if config.option.store_durations:
            from support.runs.file_scheduling import Stopwatch

            config.pluginmanager.register(Stopwatch(sweeps.unchanged_in_run(config)))
    else:
        for name in ("COLUMNS", "LINES"):  # set for workers; terminals would believe them
            os.environ.pop(name, None)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Pass a worker what it would otherwise have to compute."""
    node.workerinput["unchanged"] = sorted(sweeps.unchanged_in_run(node.config))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Record that all cases passed."""
    config = session.config
    if config.option.sweeps == "changed" and not exitstatus and not hasattr(config, "workerinput"):
        sweeps.renew()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    from support.runs.file_scheduling import FileScheduling

    return FileScheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the longest first, or one worker may still run them when the others are done."""
    sweeps.leave_out_unchanged(config, items)
    if hasattr(config, "workerinput"):
        from support.runs.file_scheduling import durations, longest_first

        longest_first(items, durations())


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """In a parallel run one worker compiles what all of them import; the others wait for it.

    Little of what is created now ever becomes garbage, so garbage collection is off.
    """
    gc.disable()
    if not hasattr(session.config, "workerinput"):
        return (yield)
    with Path(__file__).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_SH)
            fcntl.flock(file, fcntl.LOCK_UN)
        return (yield)


def pytest_collection_finish() -> None:
    """Exclude the imported objects from garbage collection, and collect others less often.

    With the usual thresholds collection took a quarter of the processor's time.
    """
    gc.freeze()
    gc.set_threshold(20_000, 50, 20)
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _threads_are_given_back() -> Iterator[None]:
    """Restore torch's threads: an engine sets them for its process, where other files come next."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else 0
    yield
    if torch:
        torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _the_driver_is_this_machines() -> None:
    """Look for NVIDIA's driver once: later, a process finds the stand-in that a test has loaded."""
    has_driver()


@pytest.fixture(scope="session", autouse=True)
def _unlike_if_asked(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.config.getoption("--unlike-products"):
        yield
        return
    from support.kernels import products

    with products.unlike_products():
        yield


@pytest.fixture
def unlike_products() -> Iterator[None]:
    """Make torch's last bits differ with the rows, as on some CPUs: for tests of closeness."""
    from support.kernels import products

    with products.unlike_products():
        yield


@pytest.fixture
def exact_products() -> Iterator[None]:
    """Make torch's order of summation invisible: for tests of equal tokens."""
    from support.kernels import products

    with products.exact_products():
        yield


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    return _model_file("SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    return _model_file("gemma-3-270m-q4_k_m.gguf")


TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random two-layer model, as a hub stores it; it has no tokenizer."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        scale: float = shape[-1] ** -0.5
        return (torch.randn(*shape, generator=generator) * scale).to(torch.bfloat16)

    hidden, middle, keys = 64, 128, 32
    tensors = {
        "model.embed_tokens.weight": random(512, hidden) * 4,
        "lm_head.weight": random(512, hidden) * 3,
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (middle, hidden),
        "mlp.up_proj": (middle, hidden),
        "mlp.down_proj": (hidden, middle),
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for name, shape in shapes.items():
            tensors[f"{prefix}{name}.weight"] = random(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    folder = tmp_path_factory.mktemp("tiny_llama")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG))
    return folder
