"""Evaluation layer by layer, with a vocabulary in pieces, equals that of a whole model."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.teacher_forcing import logits_of
from torch import Tensor

from appliance.errors import ModelError, QuantizeError
from appliance.kernels.arrays import in_torch
from appliance.kernels.backend import REFERENCE
from appliance.kernels.cache.kv_format import KVFormat
from appliance.model.layers import DecoderLayer
from appliance.model.loader import load_decoder
from appliance.model.source import open_model
from appliance.quant.formats.scheme import Fp8Scheme, WeightScheme
from appliance.quant.kv.calibrate import calibrate_kv, write_kv_plan
from appliance.quant.quality.kv_caches import (
    KV_FORMATS,
    bytes_per_token,
    caches_of,
    parse_kv_formats,
)
from appliance.quant.quality.make_card import EvaluationOptions, evaluate
from appliance.quant.run.options import Method, QuantizeOptions
from appliance.quant.run.pipeline import quantize_model
from appliance.quant.text.held_out import Windows

MakeFolder = Callable[..., Path]
CPU = torch.device("cpu")
LENGTH = 40  # no multiple of a block


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def windows() -> Windows:
    generator = torch.Generator().manual_seed(3)
    return Windows(torch.randint(50, (5, LENGTH), generator=generator), LENGTH, "made up")


@pytest.fixture
def quantized(make_llama: MakeFolder, tmp_path: Path) -> tuple[Path, Path]:
    base = make_llama()
    quantize_model(base, tmp_path / "quantized", QuantizeOptions(WeightScheme(4, 32)))
    return base, tmp_path / "quantized"


def whole(path: Path, windows: Windows, format: KVFormat = KVFormat.FP32) -> Tensor:
    """Log probabilities of a model that is in memory whole, (places, vocab_size) float64."""
    decoder = load_decoder(open_model(path), REFERENCE, CPU, torch.float32)
    rows = [logits_of(decoder, ids.tolist(), format=format)[:-1] for ids in windows.tokens]
    return torch.cat(rows).double().log_softmax(-1)


def mean_kld(base: Tensor, candidate: Tensor) -> float:
    return float((base.exp() * (base - candidate)).sum(-1).mean())


def test_streamed_measures_equal_those_of_whole_models(
    quantized: tuple[Path, Path], windows: Windows
) -> None:
    base, candidate = quantized
    found = evaluate(open_model(candidate), windows, EvaluationOptions(open_model(base)))
    assert found.against is not None
    summary = found.against.summary()
    ours, theirs = whole(candidate, windows), whole(base, windows)
    after = windows.tokens[:, 1:].reshape(-1, 1)
    assert summary.places == len(ours) == 5 * (LENGTH - 1)
    assert summary.kld_mean.value == pytest.approx(mean_kld(theirs, ours), rel=1e-3)
    assert summary.kld_mean.value > 1e-3
    expected = torch.exp(-ours.gather(1, after).mean())
    assert summary.perplexity.value == pytest.approx(float(expected), rel=1e-5)
    same = (ours.argmax(-1) == theirs.argmax(-1)).double().mean()
    assert summary.same_top_percent.value == pytest.approx(100 * float(same))


@pytest.mark.parametrize(
    "options",
    [
        QuantizeOptions(WeightScheme(4, 32, False), head=8),
        QuantizeOptions(WeightScheme(3, 32)),
        QuantizeOptions(WeightScheme(3, None, False)),
        QuantizeOptions(WeightScheme(8, None), head=4),
    ],
    ids=lambda options: f"{options.scheme}, head {options.head}",
)
def test_rounding_on_the_way_is_rounding(
    make_llama: MakeFolder, windows: Windows, tmp_path: Path, options: QuantizeOptions
) -> None:
    base, candidate = make_llama(), tmp_path / "rounded"
    quantize_model(base, candidate, options)
    found = evaluate(open_model(candidate), windows, EvaluationOptions(open_model(base)))
    assert found.against is not None
    assert found.rounded is not None
    assert float(found.against.klds.max()) > 1e-5
    torch.testing.assert_close(found.rounded.klds, found.against.klds, rtol=0, atol=1e-6)


def test_fp8_weights_are_measured_as_they_are(
    make_llama: MakeFolder, windows: Windows, tmp_path: Path
) -> None:
    base, candidate = make_llama(), tmp_path / "fp8"
    quantize_model(base, candidate, QuantizeOptions(Fp8Scheme(), Method.FP8))
    found = evaluate(open_model(candidate), windows, EvaluationOptions(open_model(base)))
    assert found.against is not None
    expected = mean_kld(whole(base, windows), whole(candidate, windows))
    assert found.against.summary().kld_mean.value == pytest.approx(expected, rel=1e-2)
    assert expected > 1e-6


def test_a_model_beside_itself_has_lost_nothing(make_llama: MakeFolder, windows: Windows) -> None:
    source = open_model(make_llama())
    found = evaluate(source, windows, EvaluationOptions(open_model(source.path), rounded=False))
    assert found.against is not None
    summary = found.against.summary()
    assert summary.kld_max == 0
    assert summary.same_top_percent.value == 100
    assert all(e.stream == e.attention == e.mlp == 0 for e in found.layers)


class WatchedLayer:
    """A layer that records the streams that it returns."""

    def __init__(self, layer: DecoderLayer, seen: list[Tensor]) -> None:
        self._layer = layer
        self._seen = seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, *args: Any) -> tuple[Tensor, Tensor]:
        hidden, stream = self._layer(*args)
        self._seen.append(stream)
        return hidden, stream


def test_layer_errors_are_relative_to_the_base(
    quantized: tuple[Path, Path], windows: Windows
) -> None:
    base, candidate = quantized
    found = evaluate(open_model(candidate), windows, EvaluationOptions(open_model(base)))
    assert len(found.layers) == 2
    streams = []
    for path in (base, candidate):
        decoder = load_decoder(open_model(path), REFERENCE, CPU, torch.float32)
        seen: list[Tensor] = []
        layers: Any = (*decoder.layers[:-1], WatchedLayer(decoder.layers[-1], seen))
        watched = replace(decoder, layers=layers)
        for ids in windows.tokens:
            logits_of(watched, ids.tolist(), format=KVFormat.FP32)
        streams.append(torch.cat(seen).double())
    expected = (streams[1] - streams[0]).norm() / streams[0].norm()
    assert found.layers[-1].stream == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("format", KV_FORMATS)
def test_kv_caches_cost_what_they_cost_a_whole_model(
    make_llama: MakeFolder, windows: Windows, format: KVFormat
) -> None:
    path = make_llama()
    caches, declared = caches_of(open_model(path), [format])
    assert declared is None
    found = evaluate(open_model(path), windows, EvaluationOptions(kv=caches))
    expected = mean_kld(whole(path, windows), whole(path, windows, format))
    assert found.against is None
    assert found.layers == ()
    (measured,) = found.kv.values()
    assert measured.summary().kld_mean.value == pytest.approx(expected, rel=0.05)
    assert expected > 1e-7


def test_fewer_bits_of_cache_cost_more(make_llama: MakeFolder, windows: Windows) -> None:
    source = open_model(make_llama())
    caches, _ = caches_of(source, KV_FORMATS)
    found = evaluate(source, windows, EvaluationOptions(kv=caches, kv_windows=3))
    klds = {name: divergence.summary() for name, divergence in found.kv.items()}
    assert {summary.places for summary in klds.values()} == {3 * (LENGTH - 1)}
    assert len(found.candidate.values) == 5 * (LENGTH - 1)
    mean = {name: summary.kld_mean.value for name, summary in klds.items()}
    assert mean["int8"] < mean["k8v4"] < mean["int4-sealed"] < mean["int4-rotated"]
    assert mean["int8"] < mean["fp8"]
    sizes = {name: bytes_per_token(source, cache) for name, cache in caches.items()}
    assert sizes["int4-rotated"] <= sizes["int4-sealed"] < sizes["k8v4"] < sizes["int8"]


def test_an_open_block_is_read_as_it_is_while_open(make_llama: MakeFolder) -> None:
    source = open_model(make_llama())
    short = Windows(torch.arange(31).view(1, 31), 31, "less than one block")
    caches, _ = caches_of(source, (KVFormat.INT8, KVFormat.INT4_SEALED))
    found = evaluate(source, short, EvaluationOptions(kv=caches))
    sealed, open_ = found.kv["int4-sealed"], found.kv["int8"]
    torch.testing.assert_close(sealed.klds, open_.klds, rtol=0, atol=1e-6)


def test_the_cache_that_a_checkpoint_declares_is_measured_as_it_is_served(
    make_llama: MakeFolder, windows: Windows, tmp_path: Path
) -> None:
    path = make_llama()
    source = open_model(path)
    rows = torch.randint(3, 50, (2, 64), generator=torch.Generator().manual_seed(0))
    plan = calibrate_kv(source, rows, tmp_path, CPU, 6.0)
    mixed = (replace(plan.layers[0], format=KVFormat.K8V4), *plan.layers[1:])
    mixed = (mixed[0], replace(mixed[1], format=KVFormat.INT4_SEALED))
    write_kv_plan(replace(plan, layers=mixed), path)
    caches, declared = caches_of(open_model(path), [KVFormat.FP8])
    assert declared == "1 layer k8v4, 1 layer int4-sealed"
    assert list(caches) == ["fp8", declared]
    scales = [layer.head_scales for layer in caches["fp8"]]
    assert scales[0] is not None
    torch.testing.assert_close(in_torch(scales[0]), plan.layers[0].head_scales)
    found = evaluate(open_model(path), windows, EvaluationOptions(kv=caches))
    decoder = load_decoder(open_model(path), REFERENCE, CPU, torch.float32)
    logits = [logits_of(decoder, i.tolist(), format=caches[declared])[:-1] for i in windows.tokens]
    ours = torch.cat(logits).double().log_softmax(-1)
    expected = mean_kld(whole(path, windows), ours)
    assert found.kv[declared].summary().kld_mean.value == pytest.approx(expected, rel=0.05)


def test_another_vocabulary_or_depth_is_refused(make_llama: MakeFolder, windows: Windows) -> None:
    ours, other = open_model(make_llama()), open_model(make_llama("b", num_hidden_layers=1))
    with pytest.raises(QuantizeError, match="source has 2 layers and b 1 layers"):
        evaluate(ours, windows, EvaluationOptions(other))
    other = open_model(make_llama("c", vocab_size=64))
    with pytest.raises(QuantizeError, match="vocabulary of 50 tokens and c a vocabulary of 64"):
        evaluate(ours, windows, EvaluationOptions(other))


def test_activations_that_are_not_finite_name_the_layer(
    make_llama: MakeFolder, windows: Windows
) -> None:
    weight = torch.full((96, 128), 3e38, dtype=torch.bfloat16)
    path = make_llama(tensors={"model.layers.1.mlp.down_proj.weight": weight})
    with pytest.raises(ModelError, match="source: layer 1 makes NaN or infinity"):
        evaluate(open_model(path), windows, EvaluationOptions())


def test_nothing_is_left_of_the_streams(
    make_llama: MakeFolder, windows: Windows, tmp_path: Path
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    evaluate(open_model(make_llama()), windows, EvaluationOptions(folder=folder))
    assert list(folder.iterdir()) == []


def test_a_full_disk_is_an_error_and_not_the_end_of_the_process(
    make_llama: MakeFolder, windows: Windows, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(QuantizeError, match=r"No space left on device; make room there or read"):
        evaluate(open_model(make_llama()), windows, EvaluationOptions(folder=tmp_path))


def test_caches_are_named_as_the_server_names_them() -> None:
    assert parse_kv_formats("int8, fp8,int8") == (KVFormat.INT8, KVFormat.FP8)
    assert parse_kv_formats("none") == ()
    assert parse_kv_formats("all") == KV_FORMATS
