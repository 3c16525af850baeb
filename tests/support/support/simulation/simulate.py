"""Run the engine's simulation for many steps, from a seed that it prints.

    scripts/simulate --steps 1000000 --seed 7
    scripts/simulate --seed 7 --era 12          # one engine of it again, as a failure says

When an engine fails, the script is reduced as far as possible and printed.
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import time

from support.simulation.simulated_eras import SimulationError, explain, simulate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("--era", type=int, default=None, help="only this one, all books each step")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--pictures", action="store_true", help="in prompts")
    options = parser.parse_args()
    logging.disable(logging.ERROR)  # failing steps are part of the plan
    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    if options.era is not None:
        failure = explain(seed, options.era, pictures=options.pictures)
        if failure is not None:
            raise SystemExit(failure)
        print(f"era {options.era} of seed {seed} runs to its end")
        return
    print(f"seed {seed}", flush=True)
    begin = time.perf_counter()
    try:
        seen = simulate(options.steps, seed, jobs=options.jobs, pictures=options.pictures)
    except SimulationError as error:
        raise SystemExit(str(error)) from None
    seconds = time.perf_counter() - begin
    for name, count in sorted(seen.items()):
        print(f"{count:>12,} {name}")
    step = 1e6 * seconds / seen["steps"]
    print(f"{seconds:.1f} seconds in {options.jobs} processes, {step:.0f} microseconds a step")


if __name__ == "__main__":
    main()
