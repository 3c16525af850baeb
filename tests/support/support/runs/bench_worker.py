"""The work of a supervised process in the tests of the supervisor."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING

from bench.gpu.supervisor import START_AGAIN, name_of

if TYPE_CHECKING:
    from bench.gpu.supervisor import Tell


def work(kinds: tuple[str, ...], tell: Tell, done: frozenset[str]) -> None:
    """Measure one thing after another; the kind decides what happens to it."""
    tell(facts=len(done))
    os.write(1, b"a library talks\n")
    for number, kind in enumerate(kinds):
        key = {"number": number}
        if name_of(key) in done:
            continue
        tell(begin=key)
        if kind == "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        if kind == "hangs":
            tell(hangs=number)
            time.sleep(1000)
        tell(row={"key": key, "found": kind})
        if kind == "spoils":
            sys.exit(START_AGAIN)


def fail(tell: Tell, done: frozenset[str]) -> None:
    """End before the first measurement."""
    sys.exit(1)
