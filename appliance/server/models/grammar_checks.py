"""Compiles grammars before the engine gets them.

A malicious grammar can keep the compiler busy, so a process with limits compiles it first, off the
event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from appliance.errors import RequestError
from appliance.grammar import Grammar
from appliance.isolated_worker import Handler, Packet, WorkerEndedError, Workers

if TYPE_CHECKING:
    from appliance.engine.nouns.messages import Vocabulary

CPU_SECONDS = 2.0
MEMORY_BYTES = 1 << 30
MAX_KNOWN = 64  # recently checked grammars: 16 MiB of text at most


class GrammarChecks:
    """Compiles grammars in another process, one at a time, and caches valid ones.

    Attributes:
        vocabulary: the model's, once a grammar or tool needed it.
    """

    def __init__(self) -> None:
        self.vocabulary: asyncio.Future[Vocabulary] | None = None
        self._workers = Workers(
            grammar_task, {}, cpu_seconds=60.0, memory_bytes=MEMORY_BYTES, most=1
        )
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._known: OrderedDict[Grammar, Grammar] = OrderedDict()

    async def check(self, grammar: Grammar, param: str) -> Grammar:
        """Compile a grammar and return it in the engine's form.

        Args:
            param: the requesting field.

        Raises:
            RequestError: it does not compile, or not in time; `param` has the place.
        """
        if grammar in self._known:
            self._known.move_to_end(grammar)
            return self._known[grammar]
        request = {"kind": grammar.kind.value, "text": grammar.text}
        loop = asyncio.get_running_loop()
        try:
            answer = await loop.run_in_executor(self._pool, self._ask, request)
        except WorkerEndedError as error:
            raise RequestError(
                f"{param} takes more than {CPU_SECONDS:.0f} s or {MEMORY_BYTES >> 20} MiB to"
                " compile; make it simpler",
                param=param,
            ) from error
        if "refused" in answer:
            place = ".".join([param, *answer["place"]])
            raise RequestError(f"{place}: {answer['refused']}", param=place)
        checked = Grammar(grammar.kind, answer["text"], grammar.after)
        self._known[grammar] = checked
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return checked

    def _ask(self, request: dict[str, str]) -> Any:
        return self._workers.ask(request, cpu_seconds=CPU_SECONDS).content

    def close(self) -> None:
        """End the process; the next grammar starts another."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._workers.close()


def grammar_task() -> Handler:
    """Make the handler that checks grammars, in a process of its own."""
    from appliance.grammar.check import answer_of

    return lambda request: Packet(answer_of(request.content))
