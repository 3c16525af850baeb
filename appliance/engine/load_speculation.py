"""Builds what proposes drafts, by the settings and by what executes the model."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from appliance.engine.execution.native_execution import NativeExecution
from appliance.engine.speculation.forced import ForcedProposer
from appliance.engine.speculation.speculator import Speculator
from appliance.engine.speculation.suffix import SuffixProposer
from appliance.errors import ConfigError

if TYPE_CHECKING:
    from appliance.config import EngineConfig
    from appliance.engine.execution.execution import Execution
    from appliance.engine.grammars.matchers import Matchers
    from appliance.engine.run.device import Device

logger = logging.getLogger(__name__)


def load_speculator(
    config: EngineConfig, execution: Execution, device: Device, matchers: Matchers
) -> Speculator | None:
    """Build what proposes drafts; None if nothing does.

    Drafts change no answer where a row's result does not depend on the rows beside it, bit for bit,
    which holds for the CPU library alone.

    Raises:
        ConfigError: speculation was asked for by name where it would change answers.
    """
    if config.speculate == "off":
        return None
    if not isinstance(execution, NativeExecution) or device.is_asynchronous:
        if config.speculate != "auto":
            raise ConfigError(
                f"--speculate {config.speculate} needs the CPU library, whose answers drafts do"
                f" not change, and {execution.name} executes this model; use --speculate auto or"
                " off"
            )
        logger.info("no speculation: %s executes the model, not the CPU library", execution.name)
        return None
    asked_for = "" if config.speculate == "auto" else f"--speculate {config.speculate}"
    proposers = (ForcedProposer(matchers), SuffixProposer())
    return Speculator(proposers, matchers, config.speculate_tokens, asked_for=asked_for)
