"""Runs every check; a check that fails is itself a finding and stops no other."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from appliance.config import EngineConfig, ServerConfig, TopConfig, cache_dir, load_section
from appliance.doctor.configuration import check_private_files, check_settings, check_variables
from appliance.doctor.finding import Check, Finding, Grade, Scope
from appliance.doctor.folders import check_folders, check_leftovers
from appliance.doctor.gpus import check_gpus
from appliance.doctor.machine import check_cpu_library, check_memory, check_wsl
from appliance.doctor.model_files import check_model
from appliance.doctor.serving import check_port, check_sample, check_server
from appliance.errors import ConfigError, ModelError
from appliance.hub import find_model

if TYPE_CHECKING:
    from appliance.hub import ResolvedModel

logger = logging.getLogger(__name__)

CHECKS: tuple[Check, ...] = (
    check_settings,
    check_variables,
    check_private_files,
    check_wsl,
    check_memory,
    check_folders,
    check_leftovers,
    check_cpu_library,
    check_gpus,
    check_model,
    check_port,
    check_server,
    check_sample,
)


def scope_of(
    config: Path | None = None,
    model: str | None = None,
    url: str | None = None,
    *,
    is_quick: bool = False,
) -> Scope:
    """Collect the inputs of the checks; unreadable settings count as the defaults.

    Args:
        config: file that a flag names.
        model: named by a flag; runs in this process if no server answers.
        url: of a server that a flag names.
        is_quick: skip checks that take more than a few seconds.
    """
    engine = _section(EngineConfig, config)
    if model is not None:
        engine = msgspec.structs.replace(engine, model=model)
    found: ResolvedModel | None = None
    problem: str | None = None
    try:
        found = find_model(engine.model, cache_dir=cache_dir())
    except ModelError as error:
        problem = str(error)
    return Scope(
        engine=engine,
        server=_section(ServerConfig, config),
        top=_section(TopConfig, config),
        config=config,
        url=url,
        model=found,
        model_problem=problem,
        runs_model=model is not None,
        is_quick=is_quick,
    )


def examine(scope: Scope, checks: Iterable[Check] | None = None) -> Iterator[Finding]:
    """Yield the findings of some checks, by default of all, as they arrive."""
    for check in CHECKS if checks is None else checks:
        try:
            yield from check(scope)
        except ConfigError as error:
            yield Finding(_name_of(check), Grade.UNKNOWN, str(error), "correct the settings first")
        except Exception as error:
            logger.debug("a check failed", exc_info=True)
            found = f"this check failed: {type(error).__name__}: {error}"
            yield Finding(_name_of(check), Grade.UNKNOWN, found, "please report it (--report)")


def _section(section: type[Any], config: Path | None) -> Any:
    try:
        return load_section(section, {}, config)
    except ConfigError:
        return section()  # `check_settings` says why


def _name_of(check: Check) -> str:
    name: str = getattr(check, "__name__", "check")
    return name.removeprefix("check_").replace("_", " ")
