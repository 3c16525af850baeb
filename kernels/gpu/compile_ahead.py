"""Compiles the kernels of recorded launches in parallel, before they are launched.

It records launches without running them, so no list of kernels has to be kept.
"""

from __future__ import annotations

import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any

import triton
from triton.backends.driver import DriverBase
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from triton.backends.compiler import GPUTarget


logger = logging.getLogger(__name__)
_parsing = Lock()  # `ast.parse` of Python 3.11 fails in several threads at once (gh-106905)


@contextmanager
def compiled_ahead(on_progress: Callable[[int, int], None]) -> Iterator[None]:
    """Compile the kernels of all launches into Triton's cache instead of launching them.

    Later launches find them in Triton's cache. Threads compile in parallel, as Triton releases the
    interpreter's lock meanwhile. A kernel that fails to compile is left to its launch, which raises
    the error.

    Args:
        on_progress: called with the numbers of finished and of all kernels.
    """
    driver = triton.runtime.driver.active
    target = driver.get_current_target()
    found: dict[tuple[str, str], Future[None]] = {}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "compile") as threads:

        def note(*, key: str, fn: Any, compile: Any, **_: object) -> bool:
            place = (f"{fn.module}.{fn.name}", key)
            if place not in found:
                found[place] = threads.submit(_compile, fn.jit_function, compile, target)
            return True  # do not compile or launch it now

        before, parse = triton.knobs.runtime.jit_cache_hook, JITFunction.parse
        JITFunction.parse = one_at_a_time(parse)
        try:
            triton.knobs.runtime.jit_cache_hook = note
            triton.runtime.driver.set_active(NoDevice(target))
            try:
                yield
            finally:
                triton.runtime.driver.set_active(driver)
                triton.knobs.runtime.jit_cache_hook = before
            for done, _ in enumerate(as_completed(found.values()), start=1):
                on_progress(done, len(found))
        finally:
            threads.shutdown(cancel_futures=True)  # they parse by the lock until they end
            JITFunction.parse = parse


def one_at_a_time(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Let one thread parse at a time."""

    def locked(function: Any) -> Any:
        with _parsing:
            return parse(function)

    return locked


def _compile(function: Any, launch: Any, target: GPUTarget) -> None:
    """Compile a recorded launch exactly as `triton.compile` would."""
    options = json.loads(launch["specialization_data"])["options"]
    options = {
        name: tuple(value) if isinstance(value, list) else value for name, value in options.items()
    }
    source = ASTSource(function, launch["signature"], launch["constants"], launch["configs"][0])
    try:
        triton.compile(source, target=target, options=options)
    except Exception as error:
        logger.warning("%s was not compiled ahead: %s", source.name, error)


class NoDevice(DriverBase):  # type: ignore[misc]
    """A device on which no kernel is ever loaded.

    Only loading or timing kernels would call the base class's other methods.
    """

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    @classmethod
    def is_active(cls) -> bool:
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_active_torch_device(self) -> Any:
        raise NotImplementedError

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int | str:
        """Return a key under which Triton stores these kernels."""
        return f"no device of {self._target}"

    def get_current_stream(self, device: int | str) -> int:
        return 0
