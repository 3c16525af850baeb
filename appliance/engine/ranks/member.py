"""The process of another rank: loads its part of the model on rank 0's order, and serves it."""

from __future__ import annotations

import argparse
import faulthandler
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from appliance import log
from appliance.engine.ranks.messages import RankFailed, send
from appliance.engine.ranks.probes import serve_probes
from appliance.errors import ApplianceError
from appliance.runtime import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.engine.ranks.messages import Join
    from appliance.engine.ranks.native_member import NativeMember
    from appliance.engine.ranks.torch_member import TorchMember


def run_member(arguments: Sequence[str]) -> int:
    """Serve on the descriptors that rank 0 passes; return the exit code."""
    parser = argparse.ArgumentParser(prog="appliance.engine.ranks")
    for name in ("socket", "exchange", "cache", "parent"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--log-level", required=True)
    parser.add_argument("--log-format", required=True)
    options = parser.parse_args(arguments)
    die_with_parent(options.parent)
    log.configure(options.log_level, options.log_format)
    faulthandler.enable()
    with Connection(options.socket) as connection:
        try:
            join = serve_probes(connection, options.exchange)
            member = _member(join, connection, options.exchange, options.cache)
        except EOFError:
            return 0
        except ApplianceError as error:
            send(connection, RankFailed(str(error), error.exit_code))
            return error.exit_code
        member.run()
    return 0


def _member(
    join: Join, connection: Connection, exchange: int, cache: int
) -> NativeMember | TorchMember:
    """Load a rank's part for the CPU library or torch."""
    if join.device is None:
        from appliance.engine.ranks.native_member import NativeMember

        return NativeMember(join, connection, exchange, cache)
    from appliance.engine.ranks.torch_member import TorchMember

    return TorchMember(join, connection, exchange, cache)
