"""Cards of tiny checkpoints, through the functions and through the command line."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from typer.testing import CliRunner

from appliance.cli import app
from appliance.commands.quality import quality_of
from appliance.commands.serve_banner import banner
from appliance.engine.nouns.messages import EngineInfo
from appliance.errors import ConfigError, QualityError, QuantizeError
from appliance.kernels.cache.kv_format import KVFormat
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.quality.card import card_of, card_path
from appliance.quant.quality.card_files import write_card
from appliance.quant.quality.facts import keep_facts
from appliance.quant.quality.make_card import CardOptions, make_card
from appliance.quant.quality.min_quality import parse_min_quality
from appliance.quant.run.options import Method, QuantizeOptions
from appliance.quant.run.pipeline import quantize_model
from appliance.quant.text.calibration import CalibrationText
from appliance.quant.text.held_out import HeldOutText
from appliance.tokenizer import Tokenizer

MakeFolder = Callable[..., Path]
ALPHABET = (string.ascii_letters + string.digits)[:50]


def add_tokenizer(folder: Path, alphabet: str = ALPHABET) -> Path:
    """Let a tiny Llama read 50 letters and digits."""
    backend = Backend(BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = ByteLevelDecoder()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").unlink()
    return folder


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def base(make_llama: MakeFolder) -> Path:
    return add_tokenizer(make_llama())


@pytest.fixture
def text(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(3)
    letters = torch.randint(50, (400,), generator=generator).tolist()
    path = tmp_path / "held-out.txt"
    path.write_text("".join(ALPHABET[i] for i in letters))
    return path


@pytest.fixture
def quantized(base: Path, text: Path, tmp_path: Path) -> Path:
    """A quantized model, with the facts of the run and without a card."""
    out = tmp_path / "W4"
    options = QuantizeOptions(
        WeightScheme(4, 32), Method.GPTQ, CalibrationText(text, 64, row_tokens=32)
    )
    keep_facts(quantize_model(base, out, options))
    return out


def options(text: Path, tokens: int = 96, **changes: object) -> CardOptions:
    settings = {"text": HeldOutText(text, tokens, 32), "kv": (KVFormat.INT8,)} | changes
    return CardOptions(**settings)  # type: ignore[arg-type]


def test_a_card_has_every_part(quantized: Path, base: Path, text: Path) -> None:
    card = make_card(quantized, base, options(text))
    assert card.comparison is not None
    assert card.comparison.places == 3 * 31
    assert card.histogram is not None
    assert sum(card.histogram.counts) == 3 * 31
    assert len(card.layers) == 2
    assert [row.format for row in card.kv] == ["int8"]
    assert card.kv[0].bits_per_value == 8.5  # 32 codes and a scale of 16 bits
    assert card.prompt_int8 is not None
    assert card.prompt_int8.places == 3 * 31
    assert 0 < card.prompt_int8.kld_mean.value < card.comparison.kld_mean.value
    assert card.quantize is not None
    assert card.quantize.method == "gptq"
    assert [a.name for a in card.alternatives] == ["rounding to nearest, same form"]
    assert card.model.readers[0] == "appliance"
    assert card.cost.peak_ram_bytes > 2**20
    assert card.cost.cpu_seconds > 0


def test_bits_are_those_of_the_stored_bytes(quantized: Path, base: Path, text: Path) -> None:
    model = make_card(quantized, base, options(text, kv=())).model
    header = 8 + int.from_bytes((quantized / "model.safetensors").read_bytes()[:8], "little")
    assert model.stored_bytes == (quantized / "model.safetensors").stat().st_size - header
    # 4 bits, a bfloat16 scale for 32 weights, and two 64-bit numbers of shape for each of 14
    # tensors.
    extra = 14 * 16 * 8 / model.linear_parameters
    assert model.linear_bits_per_weight == pytest.approx(4 + 16 / 32 + extra)


def test_without_a_base_there_is_perplexity_and_caches(base: Path, text: Path) -> None:
    card = make_card(base, None, options(text))
    assert card.comparison is None
    assert card.base is None
    assert card.layers == ()
    assert card.alternatives == ()
    assert card.perplexity.value > 1
    assert card.kv[0].comparison.kld_mean.value > 0
    assert card.prompt_int8 is None
    assert "not compared with a base" in card.line()


def test_text_that_calibration_saw_is_noticed(quantized: Path, base: Path, text: Path) -> None:
    (note,) = make_card(quantized, base, options(text, kv=())).notes  # a text of the same name
    assert note.startswith("measured on held-out.txt, which it was calibrated with too")
    other = text.with_name("other.txt")
    text.rename(other)
    assert make_card(quantized, base, options(other, kv=())).notes == ()
    fingerprint = HeldOutText(other, 96, 32).windows_of(Tokenizer.from_path(base)).fingerprint
    path = quantized / "quantize.json"
    run = json.loads(path.read_text())
    assert len(run["facts"]["calibration_fingerprint"]) == len(fingerprint)
    run["facts"]["calibration_fingerprint"] = fingerprint
    path.write_text(json.dumps(run))
    assert len(make_card(quantized, base, options(other, kv=())).notes) == 1


def test_facts_of_a_run_go_with_its_weights_only(quantized: Path, base: Path, text: Path) -> None:
    card = make_card(quantized, base, options(text, kv=()))
    weights = quantized / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    other = make_card(quantized, base, options(text, kv=()))
    assert card.quantize is not None
    assert other.quantize is None


def test_a_base_with_other_tokens_is_refused(
    quantized: Path, make_llama: MakeFolder, text: Path
) -> None:
    other = add_tokenizer(make_llama("other"), ALPHABET[::-1])
    with pytest.raises(QuantizeError, match=r"token 0 is 'a' to W4 and 'X' to other"):
        make_card(quantized, other, options(text))


def test_cards_are_compared_on_one_text_only(
    quantized: Path, base: Path, text: Path, tmp_path: Path
) -> None:
    write_card(make_card(quantized, base, options(text)), quantized)
    found = make_card(quantized, base, options(text, compare=(quantized,)))
    assert [a.name for a in found.alternatives][1:] == ["W4 (gptq)"]
    with pytest.raises(QuantizeError, match="measured on another text"):
        make_card(quantized, base, options(text, tokens=64, compare=(quantized,)))
    with pytest.raises(QuantizeError, match="no card to compare with"):
        make_card(quantized, base, options(text, compare=(base,)))


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_evaluate_writes_what_card_shows(quantized: Path, base: Path, text: Path) -> None:
    measured = ("--text", text, "--tokens", 96, "--window", 32, "--kv", "int8,bf16")
    said = json.loads(run("evaluate", quantized, "--against", base, *measured, "--json"))
    card = card_of(quantized)
    assert card is not None
    assert card.comparison is not None
    assert said["comparison"]["kld_mean"]["value"] == card.comparison.kld_mean.value
    assert json.loads(run("card", quantized, "--json")) == said
    assert run("card", quantized) == (quantized / "QUALITY.md").read_text()
    assert card.line() in (quantized / "quality.html").read_text() + run("card", quantized)


def test_a_card_may_lie_elsewhere(base: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "cards"
    run("evaluate", base, "--text", text, "--tokens", 0, "--window", 32, "--out", out)
    assert {p.name for p in out.iterdir()} == {"quality.json", "QUALITY.md", "quality.html"}
    assert not card_path(base).exists()


def test_quantize_ends_with_a_card(base: Path, tmp_path: Path) -> None:
    out, method = tmp_path / "rounded", ("--method", "rtn")
    arguments = ("quantize", base, *method, "--group-size", 32, "--out", out, "--card-tokens", 32)
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    assert "\n  with prompts in int8: mean KLD " in result.stderr
    card = card_of(out)
    assert card is not None
    assert card.quantize is not None
    assert (card.quantize.method, card.quantize.scheme) == (
        "rtn",
        "4 bits, groups of 32, symmetric",
    )
    assert card.quantize.seconds > 0
    assert card.quantize.peak_ram_bytes > 0
    assert card.alternatives == ()  # rounding is the method itself


def test_quantize_without_a_card_keeps_the_facts(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "rounded"
    run("quantize", base, "--group-size", 32, "--out", out, "--no-card")
    assert not card_path(out).exists()
    assert (out / "quantize.json").is_file()


def test_weights_are_kept_where_no_card_can_be_made(make_llama: MakeFolder, tmp_path: Path) -> None:
    base, out = make_llama("mute"), tmp_path / "rounded"  # it has no valid tokenizer
    result = CliRunner().invoke(
        app, ["quantize", str(base), "--group-size", "32", "--out", str(out)]
    )
    assert result.exit_code == 0
    assert "the weights are done, but there is no quality card" in result.stderr
    assert (out / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "error", "reason"),
    [
        (["--kv", "int3"], ConfigError, "KV cache 'int3' is not known"),
        (["--window", "3"], ConfigError, "too short"),
        (["--device", "tpu"], ConfigError, "is not auto, cpu or cuda"),
        (["--text", "/nowhere.txt"], QuantizeError, "there is no text at /nowhere.txt"),
    ],
)
def test_a_wrong_evaluation_is_one_line(
    base: Path, arguments: list[str], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        run("evaluate", base, *arguments)


def test_serving_asks_the_card(quantized: Path, base: Path, text: Path) -> None:
    with pytest.raises(QualityError, match=r"W4 has no quality card; make one with"):
        quality_of(quantized, parse_min_quality("0.1"))
    assert quality_of(quantized, None).lines == ()
    assert quality_of(base, parse_min_quality("0.1")).lines == ()  # the base was not quantized
    card = make_card(quantized, base, options(text, kv=()))
    write_card(card, quantized)
    assert card.comparison is not None
    kld = card.comparison.kld_mean.value
    found = quality_of(quantized, parse_min_quality(f"{2 * kld:.6f}"))
    assert found.lines == (card.line(),)
    assert found.card is not None
    assert found.card.as_json == (quantized / "quality.json").read_bytes()
    facts = {fact.name: fact.value for fact in found.card.facts}
    assert facts["bits_per_weight"] == card.model.bits_per_weight
    assert facts["kld_mean"] == kld
    assert {fact.note for fact in found.card.facts} == {"", f"against {base.name}"}
    with pytest.raises(QualityError, match=r"W4 has kld .* or change --min-quality"):
        quality_of(quantized, parse_min_quality(f"{kld / 2:.6f}"))
    warned = quality_of(quantized, parse_min_quality(f"warn:{kld / 2:.6f}"))
    assert warned.lines[1].startswith("warning: W4 has kld")
    info = EngineInfo(
        model="W4",
        architecture="llama",
        device="cpu",
        backend="cpu",
        weight_format="4 bits (groups of 32)",
        kv_format="bf16",
        context_length=64,
        vocab_size=50,
        eos_token_ids=(),
        block_size=16,
        num_blocks=4,
        max_num_seqs=1,
        weight_bytes=1,
        kv_bytes=1,
        workspace_bytes=1,
        memory_bytes=1,
        load_seconds=0.1,
        fingerprint="",
    )
    lines = banner("http://x", "W4", info, warned).splitlines()
    assert [line.split()[0] for line in lines].count("quality") == 2
