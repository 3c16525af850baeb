"""Rows whose embedding is given, as a picture's, against transformers' text models."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.models.native_models import LIBRARY
from support.models.teacher_forcing import BLOCK_SIZE, one_sequence
from support.models.whole_models import WHOLES, whole_model

from appliance.kernels.backend import CPU, REFERENCE
from appliance.kernels.cache.kv_format import KVFormat, precisions
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.rows.ragged import GivenRows
from appliance.model.loader import load_decoder
from appliance.model.native_loader import load_native
from appliance.model.source import ModelSource, open_model
from appliance.model.spec import AttentionSpec, RopeSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

CPU_DEVICE = torch.device("cpu")
LENGTH, HEIGHT, WIDTH = 40, 3, 4  # tokens; rows and columns of the picture
PICTURE = range(9, 9 + HEIGHT * WIDTH)
PADDING = 0  # the token that stands where there is none


@dataclass(frozen=True, slots=True)
class Case:
    """A whole model, how its rope takes three positions, and what a picture's rows see.

    Attributes:
        ahead: the class's module whose masks let a picture's rows see all of it; "" for none.
    """

    kind: str
    sections: tuple[int, int, int] | None = None
    interleaved: bool = False
    addends: int = 0
    ahead: str = ""
    settings: dict[str, Any] = field(default_factory=dict)


CASES = {
    "plain": Case("smolvlm"),
    "token_inputs": Case("gemma4"),
    "blocked": Case("qwen2_5_vl", (2, 3, 3)),
    "interleaved": Case("qwen3_vl", (3, 3, 2), interleaved=True, addends=2),
    "ahead": Case("gemma3", ahead="gemma3"),
    "ahead in windows": Case(
        "gemma4",
        ahead="gemma4",
        settings={"use_bidirectional_attention": "vision", "sliding_window": 7},
    ),
}


def rope_axes() -> torch.Tensor:
    """Positions (3, LENGTH) of text around a picture, as Qwen2-VL counts them."""
    before, after = PICTURE.start, PICTURE.stop
    text = torch.arange(before).expand(3, -1)
    rows, columns = torch.meshgrid(torch.arange(HEIGHT), torch.arange(WIDTH), indexing="ij")
    cells = torch.stack((torch.zeros(HEIGHT, WIDTH).long(), rows, columns)).flatten(1) + before
    rest = torch.arange(LENGTH - after).expand(3, -1) + before + max(HEIGHT, WIDTH)
    return torch.cat((text, cells, rest), 1)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens with a picture among them; `axes` where the model has sections."""

    token_ids: list[int]
    given: GivenRows  # of all rows
    axes: torch.Tensor | None
    sees: list[int] | None
    picture: range = PICTURE

    @classmethod
    def of(cls, case: Case, hidden_size: int, picture: range = PICTURE) -> Prompt:
        generator = torch.Generator().manual_seed(3)
        ids = torch.randint(3, 100, (LENGTH,), generator=generator).tolist()
        count = len(picture)
        ids[picture.start : picture.stop] = [PADDING] * count
        sources = torch.full((LENGTH,), -1, dtype=torch.int32)
        # Not in their order: a row takes the one that it names.
        order = torch.randperm(count, generator=generator).int()
        sources[picture.start : picture.stop] = order
        embeddings = torch.randn(count, hidden_size, generator=generator)
        addends = None
        if case.addends:
            addends = torch.randn(case.addends, count, hidden_size, generator=generator)
        given = GivenRows(sources, embeddings, addends)
        axes = rope_axes() if case.sections else None
        sees = [picture.stop if place in picture else place + 1 for place in range(LENGTH)]
        return cls(ids, given, axes, sees if case.ahead else None, picture)


def beside_pictures(source: ModelSource, case: Case) -> ModelSource:
    """Return a decoder that rotates and sees a picture's rows as the case says."""

    def turned(rope: RopeSpec) -> RopeSpec:
        return replace(rope, sections=case.sections, interleaved=case.interleaved)

    layers = []
    for layer in source.spec.layers:
        mixer = layer.mixer
        if isinstance(mixer, AttentionSpec):
            sees = bool(case.ahead) and (case.ahead == "gemma3" or mixer.window is not None)
            mixer = replace(mixer, rope=turned(mixer.rope), sees_picture=sees)
        layers.append(replace(layer, mixer=mixer))
    return replace(source, spec=replace(source.spec, layers=tuple(layers)))


def logits_of(
    decoder: Any, prompt: Prompt, chunks: Sequence[int], kv_format: KVFormat = KVFormat.FP32
) -> torch.Tensor:
    blocks = tuple(range(-(-LENGTH // BLOCK_SIZE)))
    sealed = kv_format.is_sealed
    cache = decoder.allocate_cache(
        precisions(kv_format, len(decoder.spec.cache_layers)),
        num_blocks=len(blocks),
        block_size=BLOCK_SIZE,
        num_open=len(blocks) if sealed else 0,
    )
    found, start = [], 0
    for rows in chunks:
        end = start + rows
        sees = None if prompt.sees is None else prompt.sees[start:end]
        batch = one_sequence(blocks, start, end, CPU_DEVICE, sealed=sealed, sees=sees)
        given = replace(prompt.given, sources=prompt.given.sources[start:end].contiguous())
        axes = None if prompt.axes is None else prompt.axes[:, start:end].contiguous()
        ids = torch.tensor(prompt.token_ids[start:end])
        batch = replace(batch, given=given, axes=axes)
        found.append(decoder.forward(ids, torch.arange(start, end), batch, cache))
        start = end
    return torch.cat(found)


def wanted_logits(model: Any, case: Case, prompt: Prompt) -> torch.Tensor:
    """Logits by transformers' text model, given all embeddings."""
    text = model.model if hasattr(model.model, "layers") else model.get_decoder()
    embed, ids = text.get_input_embeddings(), torch.tensor(prompt.token_ids)
    more: dict[str, Any] = {}
    with torch.no_grad():
        embeddings = embed(ids)  # with Gemma's scale
        rows = prompt.given.sources[prompt.picture.start : prompt.picture.stop].long()
        embeddings[prompt.picture.start : prompt.picture.stop] = prompt.given.embeddings[rows]
        if prompt.axes is not None:
            more["position_ids"] = prompt.axes.unsqueeze(1)
        if prompt.given.addends is not None:
            more["visual_pos_masks"] = (prompt.given.sources >= 0).unsqueeze(0)
            more["deepstack_visual_embeds"] = list(prompt.given.addends[:, rows])
        if case.kind == "gemma4":
            more["per_layer_inputs"] = text.get_per_layer_inputs(ids.unsqueeze(0), None)
        if case.ahead:
            more["attention_mask"] = masks(case, prompt, text.config, embeddings.unsqueeze(0))
        hidden = text(inputs_embeds=embeddings.unsqueeze(0), use_cache=False, **more)
        logits: torch.Tensor = model.lm_head(hidden.last_hidden_state)[0]
    return logits


def masks(
    case: Case, prompt: Prompt, config: Any, embeddings: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the masks of layers by type, as the class around the text model makes them."""
    from transformers.models.gemma3 import modeling_gemma3
    from transformers.models.gemma4 import modeling_gemma4

    module = {"gemma3": modeling_gemma3, "gemma4": modeling_gemma4}[case.ahead]
    types = torch.zeros(1, LENGTH, dtype=torch.long)
    types[0, prompt.picture.start : prompt.picture.stop] = 1
    found: dict[str, torch.Tensor] = module.create_masks_for_vision_model(
        config=config,
        inputs_embeds=embeddings,
        attention_mask=None,
        cache=None,
        position_ids=None,
        block_sequence_ids=module.get_block_sequence_ids_for_mask(types, embeddings.device),
    )
    return found


LOADERS: dict[str, Callable[[ModelSource], Any]] = {
    "reference": lambda source: load_decoder(source, REFERENCE, CPU_DEVICE, torch.float32),
    "cpu": lambda source: load_decoder(source, CPU, CPU_DEVICE, torch.float32),
    "native": lambda source: load_native(source, NativeEngine(LIBRARY, 2), torch.float32),
}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("name", CASES)
def test_given_rows_are_those_that_transformers_reads(
    name: str, loader: str, save: Callable[[Any], Path]
) -> None:
    case = CASES[name]
    settings = WHOLES[case.kind] | case.settings
    if case.sections:
        settings["rope_parameters"] = settings["rope_parameters"] | {
            "mrope_section": list(case.sections)
        }
    model = whole_model(case.kind, settings)
    source = beside_pictures(open_model(save(model)), case)
    prompt = Prompt.of(case, source.spec.hidden_size)
    decoder = LOADERS[loader](source)
    wanted = wanted_logits(model, case, prompt)
    found = logits_of(decoder, prompt, [LENGTH])
    assert wanted.std() > 0.5  # the logits vary
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
    if case.ahead:
        blind = logits_of(decoder, replace(prompt, sees=None), [LENGTH])
        assert (blind - wanted).abs().max() > 0.1  # what lies ahead shows
    inside = () if case.ahead else (PICTURE.start + 5,)
    for cut in (PICTURE.start, *inside, PICTURE.stop):  # before, in and after it
        pieces = logits_of(decoder, prompt, [cut, LENGTH - cut])
        torch.testing.assert_close(pieces, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("kv_format", [KVFormat.INT8, KVFormat.INT4_SEALED, KVFormat.K8V4])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.ahead])
def test_rows_see_their_picture_in_quantized_blocks(
    name: str, kv_format: KVFormat, loader: str, save: Callable[[Any], Path]
) -> None:
    """Across the end of a block, which a sealed cache seals before they attend."""
    case = CASES[name]
    model = whole_model(case.kind, WHOLES[case.kind] | case.settings)
    source = beside_pictures(open_model(save(model)), case)
    prompt = Prompt.of(case, source.spec.hidden_size, range(23, 37))
    decoder = LOADERS[loader](source)
    wanted = wanted_logits(model, case, prompt)
    found = logits_of(decoder, prompt, [LENGTH], kv_format)
    blind = logits_of(decoder, replace(prompt, sees=None), [LENGTH], kv_format)
    lost = (found - wanted).square().mean()
    assert lost < (0.02 if kv_format is KVFormat.INT8 else 0.05) * (blind - wanted).square().mean()
    for cut in prompt.picture.start, prompt.picture.stop:
        pieces = logits_of(decoder, prompt, [cut, LENGTH - cut], kv_format)
        assert (pieces - found).square().mean() < 0.01 * lost


@pytest.mark.parametrize("fault", ["source", "addends", "no embeddings"])
def test_rows_given_from_nowhere_are_refused(fault: str, save: Callable[[Any], Path]) -> None:
    case = CASES["interleaved"]
    source = beside_pictures(open_model(save(whole_model(case.kind, WHOLES[case.kind]))), case)
    prompt = Prompt.of(case, source.spec.hidden_size)
    given = prompt.given
    assert given.addends is not None
    count = len(source.spec.layers) if fault == "addends" else 1
    sources = given.sources + int(fault == "source")
    embeddings = given.embeddings[: 0 if fault == "no embeddings" else None]
    given = GivenRows(sources, embeddings, given.addends[:1].expand(count, -1, -1).contiguous())
    with pytest.raises(AssertionError, match="BAD_ARGUMENT"):
        logits_of(LOADERS["native"](source), replace(prompt, given=given), [LENGTH])


@pytest.mark.parametrize("kv_format", [KVFormat.FP32, KVFormat.INT4_SEALED])
@pytest.mark.parametrize("fault", ["own", "order", "beyond"])
def test_sights_that_no_prompt_has_are_refused(
    fault: str, kv_format: KVFormat, save: Callable[[Any], Path]
) -> None:
    case = CASES["ahead"]
    source = beside_pictures(open_model(save(whole_model(case.kind, WHOLES[case.kind]))), case)
    prompt = Prompt.of(case, source.spec.hidden_size)
    assert prompt.sees is not None
    sees = list(prompt.sees)
    row, seen = {"own": (3, 3), "order": (PICTURE.start + 1, PICTURE.stop - 1), "beyond": (39, 41)}[
        fault
    ]
    sees[row] = seen
    with pytest.raises(AssertionError, match="BAD_ARGUMENT"):
        logits_of(LOADERS["native"](source), replace(prompt, sees=sees), [LENGTH], kv_format)


@pytest.mark.parametrize("fault", ["", "alone", "elsewhere"])
def test_open_blocks_that_a_step_lacks_are_not_read(
    fault: str, save: Callable[[Any], Path]
) -> None:
    """A row's picture goes on in the next block; the step ends before it, or has another one."""
    case = CASES["ahead"]
    source = beside_pictures(open_model(save(whole_model(case.kind, WHOLES[case.kind]))), case)
    end, stop = (BLOCK_SIZE if fault == "alone" else LENGTH), 37
    decoder = LOADERS["native"](source)
    cache = decoder.allocate_cache(
        precisions(KVFormat.INT4_SEALED, len(decoder.spec.cache_layers)),
        num_blocks=3,
        block_size=BLOCK_SIZE,
        num_open=2,
    )
    sees = [stop if 23 <= place < stop else place + 1 for place in range(end)]
    batch = one_sequence((0, 1), 0, end, CPU_DEVICE, sealed=True, sees=sees)
    if fault == "elsewhere":
        batch.block_tables[1, 1] = 2
    rows = torch.arange(end)
    if not fault:
        assert decoder.forward(rows, rows, batch, cache).isfinite().all()
        return
    with pytest.raises(AssertionError, match="BAD_ARGUMENT"):
        decoder.forward(rows, rows, batch, cache)
