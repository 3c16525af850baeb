"""Opens the API process: its socket, its models and their engines; and runs it."""

from __future__ import annotations

import resource
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import uvloop

from appliance.config import jobs_dir
from appliance.engine.process.client import EngineClient
from appliance.engine.process.launch import ENGINE_COMMAND
from appliance.log import RecentWarnings
from appliance.server.api_server import ApiServer
from appliance.server.http.certificate import Certificate
from appliance.server.http.listener import bind
from appliance.server.models.model_state import MissingModel, ModelState
from appliance.server.models.replicas import Memories, make_engine
from appliance.server.models.state import ServerState
from appliance.service.notice import ServiceNotice

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from appliance.config import EngineConfig, Settings
    from appliance.engine.process.launch import LaunchedProcess
    from appliance.engine.process.replica import Replica
    from appliance.engine.process.residency import Residency
    from appliance.engine.process.supervisor import ProgressCallback
    from appliance.server.api_server import ReadyCallback
    from appliance.server.models.model_state import FoundModel, ModelToServe


def run_server(
    settings: Settings,
    found: Sequence[ModelToServe | MissingModel],
    *,
    on_progress: ProgressCallback,
    on_ready: ReadyCallback,
    engine_command: Sequence[str] = ENGINE_COMMAND,
    launched: LaunchedProcess | None = None,
    warnings: RecentWarnings | None = None,
    notice: ServiceNotice | None = None,
) -> int:
    """Serve until a signal ends it.

    SIGTERM, SIGINT and SIGHUP drain running streams; a second signal ends at once.

    Args:
        found: the models of `settings.served`; loads the first that loads now, others on request,
            missing ones as soon as they can be had.
        on_progress: called with stage, done, total while the model loads.
        on_ready: called once the server accepts requests.
        launched: the first engine process, if already started.
        warnings: log lines kept for dashboards.
        notice: notifies the service manager, if any.

    Returns:
        Number of finished requests.

    Raises:
        ConfigError: the address is unavailable, a certificate is unusable, or two models share a
            name.
        ApplianceError: no model can be loaded.
        EngineError: a part without which it cannot serve has failed for good.
    """
    with opened_server(
        settings,
        found,
        engine_command=engine_command,
        launched=launched,
        warnings=warnings,
        notice=notice,
    ) as server:
        uvloop.run(server.run(on_progress, on_ready))
    return server.state.finished


@contextmanager
def opened_server(
    settings: Settings,
    found: Sequence[ModelToServe | MissingModel],
    *,
    engine_command: Sequence[str] = ENGINE_COMMAND,
    launched: LaunchedProcess | None = None,
    warnings: RecentWarnings | None = None,
    notice: ServiceNotice | None = None,
) -> Iterator[ApiServer]:
    """Open the listening socket of a server that is not running yet; see `run_server`."""
    config = settings.server
    certificate = Certificate(config.tls_cert, config.tls_key) if config.tls_cert else None
    sock = bind(config)
    _allow_descriptors(config.max_connections)
    with sock:
        state = ServerState(
            config,
            settings.aliases,
            warnings=warnings or RecentWarnings(),
            jobs_folder=jobs_dir(),
        )
        memories = Memories(config.models_memory, is_shared=len(found) > 1)
        first = next((one for one in found if not isinstance(one, MissingModel)), None)
        files: FoundModel | MissingModel
        for model, of in zip(settings.served, found, strict=True):
            if isinstance(of, MissingModel):
                files, name, local, card = of, of.name, of.engine, None
            else:
                files, name = of.model, model.name or of.model.name
                local, card = of.local_engine, of.quality_card

            def make(
                engine: EngineConfig,
                memory: Residency,
                place: int,
                replica: Replica | None,
                *,
                name: str = name,
                is_first: bool = of is first,
            ) -> EngineClient:
                return EngineClient(
                    engine,
                    command=engine_command,
                    launched=launched if is_first and place == 0 else None,
                    idle_timeout=config.idle_timeout,
                    residency=memory,
                    name=name if replica is None else f"replica {place} of {name}",
                    replica=replica,
                    on_lost=partial(state.fail, f"the supervision of {name}"),
                )

            engine = make_engine(local, memories, make)
            state.models.append(ModelState(state, engine, files, name, quality_card=card))
        state.check_names()
        yield ApiServer(state, sock, certificate, notice or ServiceNotice())


def _allow_descriptors(connections: int) -> None:
    """Raise the limit of open files for that many connections, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * connections + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
