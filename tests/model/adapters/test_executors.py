"""Adapters on every form of weights equal PEFT's, in both executors; base rows keep their bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.gguf.gguf_models import gguf_factors, write_gguf, write_gguf_adapter
from support.models.centered_models import CENTERED
from support.models.checkpoint_forms import FORMS, SHAPES, write_both
from support.models.lora import write_adapter
from support.models.native_models import native
from support.models.recurrent_models import RECURRENT
from support.models.teacher_forcing import BLOCK_SIZE, logits_of, with_adapters

from appliance.kernels.backend import REFERENCE
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.rows.ragged import RaggedBatch
from appliance.kernels.weights.weight import dense
from appliance.model.adapters.reader import read_adapter
from appliance.model.adapters.targets import adapter_targets
from appliance.model.loader import load_decoder
from appliance.model.source import open_model

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.kernels.cpu.structs import Isa
    from appliance.model.adapters.adapter import AdapterSlots
    from appliance.model.executor import Executor
    from appliance.model.source import ModelSource

# PEFT uses a property of transformers that is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
CPU_DEVICE = torch.device("cpu")
ALL = {
    f"model.layers.{layer}.{name}": shape for layer in range(2) for name, shape in SHAPES.items()
}


def slots_with(
    executor: Executor[Any], source: ModelSource, folders: list[Path], *, most_ranks: int = 64
) -> AdapterSlots:
    """Lay adapters out in slots 0, 1, ..."""
    targets = adapter_targets(source.spec, source.family.names)
    slots = executor.adapter_slots(targets, len(folders), most_ranks)
    for slot, folder in enumerate(folders):
        slots.put(slot, slots.lay_out(read_adapter(folder, source, most_ranks)))
    return slots


def of_peft(model: Path, adapter: Path, token_ids: list[int]) -> torch.Tensor:
    """Return the logits that PEFT and transformers compute in float32."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, str(adapter)).eval()
    with torch.no_grad():
        logits: torch.Tensor = adapted(torch.tensor([token_ids])).logits[0]
    return logits


def write_for(source: ModelSource, folder: Path, left_out: str = "-") -> Path:
    """Write an adapter of all linears that it may change, but for names that contain a word."""
    targets = adapter_targets(source.spec, source.family.names)
    shapes = {
        name: (one.slot.shape[0], one.slot.shape[1])
        for name, one in targets.items()
        if left_out not in name
    }
    return write_adapter(folder, shapes, rank=5)


@pytest.mark.parametrize("form", FORMS)
def test_an_adapter_on_each_form_of_weights_is_that_of_peft(
    form: str, tmp_path: Path, token_ids: list[int]
) -> None:
    quantized, dense = write_both(tmp_path, FORMS[form])
    folder = write_adapter(tmp_path / "adapter", ALL, rank=5)
    expected = of_peft(dense.path, folder, token_ids)
    decoder = load_decoder(quantized, REFERENCE, CPU_DEVICE, torch.float32)
    base = logits_of(decoder, token_ids)
    change = float((expected - base).norm() / base.norm())
    assert change > 0.1, "an adapter that says something"
    slots = slots_with(decoder, quantized, [folder])
    found = logits_of(decoder, token_ids, adapters=slots)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    held = native(quantized.path)
    found = logits_of(held, token_ids, adapters=slots_with(held, quantized, [folder]))
    share = float((found - expected).norm() / expected.norm())
    assert share < (1e-5 if form.startswith("fp8") else 0.04)  # 8-bit activations


def test_a_gguf_model_takes_adapters_of_peft_and_of_llama_cpp(
    make_model: Any, save: Any, tmp_path: Path, token_ids: list[int]
) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    model = make_model("llama", num_hidden_layers=2, **sizes)
    metadata = {"rope.freq_base": 10000.0}
    source = open_model(write_gguf(tmp_path / "m.gguf", model, "llama", metadata, quantize=True))
    stored = {slot.name: source.weights.load(slot.name) for slot in source.slots()}
    model.load_state_dict({name: dense(weight, torch.float32) for name, weight in stored.items()})
    folder = write_for(source, tmp_path / "adapter")
    expected = of_peft(save(model), folder, token_ids)
    factors = gguf_factors(source, read_adapter(folder, source, 64).parts)
    file = write_gguf_adapter(tmp_path / "adapter.gguf", factors, alpha=10.0)
    decoder = load_decoder(source, REFERENCE, CPU_DEVICE, torch.float32)
    assert float((logits_of(decoder, token_ids) - expected).norm() / expected.norm()) > 0.1
    held = native(source.path)
    for path in (folder, file):
        found = logits_of(decoder, token_ids, adapters=slots_with(decoder, source, [path]))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
        found = logits_of(held, token_ids, adapters=slots_with(held, source, [path]))
        assert float((found - expected).norm() / expected.norm()) < 0.04  # 8-bit activations


@pytest.mark.parametrize(
    ("model", "linear"),
    [
        (RECURRENT["qwen3_next"], "in_proj_qkvz"),
        (RECURRENT["qwen3_5"], "in_proj_qkv"),
        (("falcon", CENTERED["falcon-new"][1] | {"hidden_size": 96}), "query_key_value"),
    ],
    ids=["qwen3_next", "qwen3_5", "falcon-new"],
)
def test_rows_of_an_adapter_go_where_those_of_its_linear_go(
    model: tuple[str, dict[str, Any]],
    linear: str,
    make_model: Any,
    save: Any,
    tmp_path: Path,
    token_ids: list[int],
) -> None:
    """Checkpoints order some linears by key head, executors by kind."""
    model_type, settings = model
    source = open_model(save(make_model(model_type, **settings)))
    # PEFT mistakes the shared MLP of a model with experts for experts.
    folder = write_for(source, tmp_path / "adapter", left_out=".mlp.")
    assert linear in (folder / "adapter_config.json").read_text()
    expected = of_peft(source.path, folder, token_ids)
    executors: list[Executor[Any]] = [
        load_decoder(source, REFERENCE, CPU_DEVICE, torch.float32),
        native(source.path),
    ]
    for executor in executors:
        found = logits_of(executor, token_ids, adapters=slots_with(executor, source, [folder]))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_kld_against_merged_weights(tmp_path: Path, token_ids: list[int]) -> None:
    """It runs in bfloat16, the default: only the factors are rounded, once."""
    _, dense = write_both(tmp_path, FORMS["fp8"])
    folder = write_adapter(tmp_path / "adapter", ALL, rank=16, dtype=torch.bfloat16)
    expected = of_peft(dense.path, folder, token_ids)
    executor = native(dense.path)
    found = logits_of(executor, token_ids, adapters=slots_with(executor, dense, [folder]))
    assert divergence(expected, found) <= 1e-5


def divergence(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Return the mean KL divergence of logits."""
    exact, other = expected.log_softmax(-1), found.log_softmax(-1)
    return float(torch.nn.functional.kl_div(other, exact, log_target=True, reduction="sum")) / len(
        exact
    )


def test_kld_on_packed_weights_is_that_of_the_model_itself(
    tmp_path: Path, token_ids: list[int]
) -> None:
    """Only the 8-bit activations differ from dequantized weights + BA, with or without it."""
    quantized, _ = write_both(tmp_path, FORMS["awq"])
    folder = write_adapter(tmp_path / "adapter", ALL, rank=16, dtype=torch.bfloat16)
    exact = load_decoder(quantized, REFERENCE, CPU_DEVICE, torch.float32)
    executors: list[Executor[Any]] = [exact, native(quantized.path)]
    adapted = [
        logits_of(one, token_ids, adapters=slots_with(one, quantized, [folder]))
        for one in executors
    ]
    without = divergence(*(logits_of(one, token_ids) for one in executors))
    assert 0 < divergence(*adapted) < min(0.002, 1.5 * without)


def test_factors_beside_packed_weights_take_a_byte_each(tmp_path: Path) -> None:
    quantized, dense = write_both(tmp_path, FORMS["awq"])
    folder = write_adapter(tmp_path / "adapter", ALL, rank=16)
    taken = []
    for source in (quantized, dense):
        targets = adapter_targets(source.spec, source.family.names)
        slots = native(source.path).adapter_slots(targets, 1, 16)
        taken.append(slots.lay_out(read_adapter(folder, source, 16)).nbytes)
    numbers = sum(16 * sum(shape) for shape in ALL.values())
    structs = taken[1] - 4 * numbers  # includes scales; the same beside packed weights
    assert taken[0] - structs == numbers


@pytest.fixture
def mixed(tmp_path: Path) -> tuple[ModelSource, list[Path]]:
    quantized, _ = write_both(tmp_path, FORMS["awq"])
    some = {name: shape for name, shape in ALL.items() if "o_proj" in name or "up_proj" in name}
    folders = [
        write_adapter(tmp_path / "wide", ALL, rank=20),
        write_adapter(tmp_path / "narrow", some, rank=3, seed=9),
    ]
    return quantized, folders


def run_together(
    executor: Executor[Any], slots: list[int], table: AdapterSlots, rows: list[int]
) -> list[torch.Tensor]:
    """Run sequences of so many rows each in one step; return the logits of each."""
    random = torch.Generator().manual_seed(4)
    tokens = [torch.randint(3, 97, (count,), generator=random) for count in rows]
    cache = executor.allocate_cache(KVFormat.FP32, num_blocks=len(rows), block_size=BLOCK_SIZE)
    batch = RaggedBatch.of(
        rows, rows, [[i] for i in range(len(rows))], block_size=BLOCK_SIZE, device=CPU_DEVICE
    )
    if any(slot >= 0 for slot in slots):
        batch = with_adapters(batch, slots, table)
    positions = torch.cat([torch.arange(count) for count in rows])
    # The last row of each, as in sampling: the last layer continues with only these.
    ends = torch.tensor(rows).cumsum(0) - 1
    logits = executor.forward(torch.cat(tokens), positions, batch, cache, ends)
    return list(logits)


ROWS = [1, 1, 7, 1, 30, 2]
SLOTS = [0, -1, 1, 1, 0, -1]


def test_a_mix_in_one_step_keeps_every_bit(mixed: tuple[ModelSource, list[Path]], isa: Isa) -> None:
    """Base rows equal those without adapters beside them, adapted rows those of adapters alone."""
    source, folders = mixed
    executor = native(source.path, threads=2)
    table = slots_with(executor, source, folders)
    together = run_together(executor, SLOTS, table, ROWS)
    plain = run_together(executor, [-1] * len(ROWS), table, ROWS)
    for slot in range(-1, 2):
        alone = run_together(executor, [slot] * len(ROWS), table, ROWS)
        for i, own in enumerate(SLOTS):
            if own == slot:
                assert torch.equal(together[i], alone[i])
                assert torch.equal(together[i], plain[i]) == (slot < 0)


def test_torch_mixes_the_same(mixed: tuple[ModelSource, list[Path]]) -> None:
    source, folders = mixed
    exact = load_decoder(source, REFERENCE, CPU_DEVICE, torch.float32)
    table = slots_with(exact, source, folders)
    together = run_together(exact, SLOTS, table, ROWS)
    plain = run_together(exact, [-1] * len(ROWS), table, ROWS)
    held = native(source.path)
    beside = run_together(held, SLOTS, slots_with(held, source, folders), ROWS)
    for i, slot in enumerate(SLOTS):
        assert torch.equal(together[i], plain[i]) == (slot < 0)
        assert float((beside[i] - together[i]).norm() / together[i].norm()) < 0.04


def test_a_slot_is_emptied_and_filled_anew(mixed: tuple[ModelSource, list[Path]]) -> None:
    source, folders = mixed
    executor = native(source.path)
    table = slots_with(executor, source, folders)
    first, second = (run_together(executor, [slot], table, [9])[0] for slot in range(2))
    table.put(0, None)
    with pytest.raises(AssertionError, match="BAD_ARGUMENT"):
        run_together(executor, [0], table, [9])
    table.put(0, table.lay_out(read_adapter(folders[1], source, 64)))
    assert torch.equal(run_together(executor, [0], table, [9])[0], second)
    assert not torch.equal(first, second)


def test_no_rows_of_the_last_layer_are_left(mixed: tuple[ModelSource, list[Path]]) -> None:
    """A step that only fills the cache selects no row."""
    source, folders = mixed
    assert open_model(source.path).spec == source.spec
    executor = native(source.path)
    table = slots_with(executor, source, folders)
    cache = executor.allocate_cache(KVFormat.FP32, num_blocks=1, block_size=BLOCK_SIZE)
    batch = RaggedBatch.of([5], [5], [[0]], block_size=BLOCK_SIZE, device=CPU_DEVICE)
    tokens, positions = torch.arange(3, 8), torch.arange(5)
    none = torch.empty(0, dtype=torch.int64)
    step = (tokens, positions, with_adapters(batch, [0], table), cache)
    assert executor.forward(*step, none).shape == (0, 97)
