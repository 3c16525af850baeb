"""Start an engine, get one token out of it, and print the moments: a process of `start`."""

from __future__ import annotations

import json
import sys
import time

moments = {"interpreter": time.time()}


def main(amount: str, kv: str) -> None:
    """Print the moments, in seconds since the epoch, as a line of JSON."""
    from bench.gpu.device_model import load_engine
    from bench.gpu.plan import Amount
    from bench.gpu.requests import drain
    from bench.lib.requests import submit

    moments["imported"] = time.time()
    engine = load_engine(Amount(amount), kv)
    moments["ready"] = time.time()
    submit(engine, 1, 20, 1)
    drain(engine)
    moments["first_token"] = time.time()
    print(json.dumps(moments))


if __name__ == "__main__":
    main(*sys.argv[1:])
