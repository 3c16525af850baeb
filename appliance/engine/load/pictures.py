"""Opens what reads pictures beside a model: its image processor and its vision tower."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import msgspec

from appliance.engine.run.encoded_pictures import EncodedPictures
from appliance.engine.run.picture_encoder import PictureEncoder
from appliance.engine.run.picture_queue import PictureQueue
from appliance.errors import ConfigError, ModelError
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.library import load_library
from appliance.kernels.cpu.structs import Isa
from appliance.media.processor_config import read_image_processor
from appliance.media.sizing import BudgetRule, FixedRule, TokenRange
from appliance.model.vision.families.registry import has_tower
from appliance.model.vision.source import tower_of
from appliance.model.vision.spec import SeesAhead
from appliance.model.vision.tower import load_native_tower
from appliance.model.vision.workspace import RowForm, workspace_bytes
from appliance.model_files.files_beside import find_projector, projectors_beside

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from appliance.config import EngineConfig
    from appliance.engine.load.execution.execution import Execution
    from appliance.engine.memory.plan import MemoryRequest
    from appliance.engine.run.device import Device
    from appliance.media.spec import ImageProcessorSpec
    from appliance.model.source import ModelSource
    from appliance.model.vision.source import TowerSource
    from appliance.model.vision.tower import Tower

KEPT_BYTES = 256 << 20  # of pictures' rows, which a later turn reads again
_SCALE_BYTES = 1 / 8  # of a weight in codes: a scale and an offset for 32 of them


@dataclass(frozen=True, slots=True)
class PictureSource:
    """A model's processor and tower, opened and checked.

    Attributes:
        text: the model that its rows are for.
        uncut_rows: of the largest picture, where a step must have all rows of a picture because
            they see each other; 0 where it may have some.
    """

    processor: ImageProcessorSpec
    tower: TowerSource
    text: ModelSource
    uncut_rows: int = 0

    @property
    def spare_rows(self) -> int:
        """Rows of a step beyond those planned, for the rest of a picture."""
        return max(0, self.uncut_rows - 1)

    def with_room(self, config: EngineConfig) -> EngineConfig:
        """Return the settings with room in a step for the rest of a picture."""
        most = config.max_num_batched_tokens + self.spare_rows
        return msgspec.structs.replace(config, max_num_batched_tokens=most)

    def num_bytes(
        self, element_bytes: int, most_rows: int, threads: int, *, in_library: bool
    ) -> int:
        """Count the bytes of the tower's weights, of its largest step, and of rows kept.

        Args:
            element_bytes: of a weight of its layers.
            most_rows: of a prompt, which no picture in it exceeds.
            threads: of a step.
            in_library: the C library runs it.
        """
        weights = self.tower.weights
        in_codes, other = 0.0, 0
        for name in weights.tensor_names():
            count, bits = prod(weights.shape(name)), weights.packed_bits(name)
            if bits is None:
                other += count
            else:
                in_codes += count * (bits / 8 + _SCALE_BYTES)
        tiles, cells = self.processor.size_rule.most_tiles
        cells = min(cells, most_rows)
        workspace = workspace_bytes(
            self.tower.spec,
            min(tiles, most_rows // cells),
            cells,
            self.text.spec.hidden_size,
            threads,
            _row_form(element_bytes, in_codes=in_codes > 0) if in_library else RowForm.PLAIN,
        )
        return int(in_codes) + other * element_bytes + workspace + KEPT_BYTES

    def added_to(self, request: MemoryRequest, execution: Execution, threads: int) -> MemoryRequest:
        """Add the tower to a request, with room for the largest picture that a prompt can have."""
        most = request.max_model_len or request.spec.context_length
        element_bytes = execution.precision.dtype.itemsize
        own = self.num_bytes(element_bytes, most, threads, in_library=execution.in_library)
        return replace(request, picture_bytes=own)

    def load(
        self,
        execution: Execution,
        device: Device,
        threads: int,
        on_progress: Callable[[str, int, int], None],
    ) -> PictureQueue:
        """Read the tower's weights.

        Raises:
            CheckpointError: a weight holds NaN or infinity, or is missing.
            MemoryError: the system has too little memory for the weights.
        """
        tower = self._tower(execution, device, threads, on_progress)
        encoder = PictureEncoder(tower, self.processor)
        encoded = EncodedPictures(
            encoder, device, limit_bytes=KEPT_BYTES, sees_ahead=self.uncut_rows > 0
        )
        return PictureQueue(encoder, encoded, beside_steps=not device.is_asynchronous)

    def _tower(
        self,
        execution: Execution,
        device: Device,
        threads: int,
        on_progress: Callable[[str, int, int], None],
    ) -> Tower:
        dtype = execution.precision.dtype
        if execution.in_library:
            engine = NativeEngine(load_library(), threads)
            kept = execution.kept_weights(self.tower.layers.path)
            return load_native_tower(self.tower, engine, dtype, on_progress, kept)
        from appliance.model.vision.torch_tower import load_torch_tower

        path = self.tower.layers.path
        source = tower_of(self.text, path if path.is_file() else None)
        assert source is not None
        return load_torch_tower(source, device.torch_device, dtype, on_progress)


def _row_form(element_bytes: int, *, in_codes: bool) -> RowForm:
    if in_codes:
        return RowForm.CODES
    is_tiled = element_bytes == 2 and load_library().ap_current_isa() == Isa.AMX
    return RowForm.SPLIT if is_tiled else RowForm.PLAIN


def open_pictures(
    config: EngineConfig, source: ModelSource
) -> tuple[PictureSource | None, tuple[str, ...]]:
    """Open processor and tower of a model.

    Returns:
        None if the model has none, or one that cannot be run, with notes on why.
    """
    if not config.images:
        return None, ()
    projector = find_projector(source.path, config.mmproj)
    if projector is None and source.path.is_file():
        return None, _how_to_add(source)
    try:
        found, why = _opened(config, source, projector)
    except ModelError as error:
        if config.mmproj:
            raise
        return None, _texts_alone(str(error))
    if why is not None and config.mmproj:
        raise ConfigError(f"--mmproj {config.mmproj}: {why}")
    if why is not None:
        return None, _texts_alone(why)
    return found, () if projector is None or config.mmproj else _chosen(source.path)


def _chosen(model: Path) -> tuple[str, ...]:
    """Say which projector file is taken where several are beside a model."""
    chosen, *others = projectors_beside(model)
    if not others:
        return ()
    named = ", ".join(one.name for one in others)
    return (
        f"pictures are read with {chosen.name}, the nearest to the model; beside it are {named},"
        " which --mmproj can name",
    )


def _opened(
    config: EngineConfig, source: ModelSource, projector: Path | None
) -> tuple[PictureSource | None, str | None]:
    """Open processor and tower; say why not if there is a tower that cannot be run.

    Raises:
        ModelError: a file is damaged, of another model, or not supported.
    """
    allowed = TokenRange.of(config.image_tokens)
    tower = tower_of(source, projector, in_torch=False)
    if tower is None:
        return None, None
    processor = read_image_processor(source.path, projector)
    if processor is None:
        return None, (
            f"{source.path.name} has neither preprocessor_config.json nor processor_config.json;"
            " fetch the model again"
        )
    processor = processor.narrowed(allowed)
    if (why := _why_not(config, source)) is not None:
        return None, why
    if tower.spec.rows_see_ahead is SeesAhead.NOWHERE:
        return PictureSource(processor, tower, source), None
    rule = processor.size_rule
    assert isinstance(rule, FixedRule | BudgetRule), "of a family whose rows see each other"
    return PictureSource(processor, tower, source, rule.most_rows), None


def _how_to_add(source: ModelSource) -> tuple[str, ...]:
    """Say how a GGUF model whose family reads pictures gets its tower."""
    mapping = source.family.gguf
    if mapping is None or not has_tower(mapping.architecture):
        return ()
    return _texts_alone(
        f"no projector file is beside {source.path.name}; put its publisher's mmproj file into"
        f" {source.path.parent}, or name it with --mmproj"
    )


def _why_not(config: EngineConfig, source: ModelSource) -> str | None:
    """Say why a model's pictures cannot be read though its tower can be run."""
    if config.is_divided:
        return "ranks divide this model, and only a process alone reads them"
    if source.fallback is not None:
        return f"transformers' modules run the text of {source.path.name}"
    return None


def _texts_alone(why: str) -> tuple[str]:
    return (f"pictures are not read, and texts are served alone: {why}",)
