"""No failure between a request's arrival and its last byte leaves anything of it behind.

Every route of the table is made to fail at every stage. A stage is a function of the server that
the request calls or resumes, its first call and its last; it fails by an exception, by cancellation
and by a client that disconnects. The socket, too, breaks at the first message, the last and
between.
"""

from __future__ import annotations

import asyncio
import dis
import inspect
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.runs.waiting import until
from support.server.every_route import ENDLESS, Call, Client, every_call

import appliance
from appliance.config import ServerConfig
from appliance.server.app import create_app
from appliance.server.models.state import ServerState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from types import CodeType, FrameType

    from starlette.types import Message

    from tests.server.conftest import Running, Serve

HOUSE = f"{Path(appliance.__file__).parent}/"
ROOMS = (
    "server/", "tokenizer/", "dialects/", "text.py",
    "engine/process/client.py",
)  # fmt: skip
BEGINNING = bytes((dis.opmap["RESUME"], 0))  # a function's first instruction
# Not a stage of the request: its cleanup, and what the engine's reports call.
ELSEWHERE = {"__exit__", "__aexit__", "forget", "data_received"}
CALLS = [
    call
    for call in every_call(create_app(ServerState(ServerConfig())))
    if call.method != "GET" or call.path == ENDLESS
]
CALLS += [replace(call, again=True) for call in CALLS if "stream" in (call.body or {})][:2]

Stage = tuple["CodeType", int]  # a function, and the number of its call


@cache
def is_of_request(code: CodeType) -> bool:
    name = code.co_filename
    return name.startswith(HOUSE) and name[len(HOUSE) :].startswith(ROOMS)


class Profile:
    """Counts calls of the server's functions from the first `with` on, and acts at one of them.

    Args:
        act: the action.
        raises: whether the action raises, and so does the function.
    """

    def __init__(
        self, at: Stage | None = None, act: Callable[[], object] = lambda: None, *, raises: bool
    ) -> None:
        self._raises = raises
        self._holds = False
        self._counts: Counter[CodeType] = Counter()
        self._turns: dict[Stage, int] = {}
        self._turn = 0
        self._goes_on: set[CodeType] = set()  # functions that call stages
        self._loop: FrameType | None = None
        self.acted = False
        self._at, self._act = at, act

    def begin(self) -> None:
        """Begin to count; called in a task's coroutine."""
        self._loop = _loop_under(sys._getframe(1))
        sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call":
            return
        if frame.f_back is self._loop:
            self._turn += 1
        self._holds = self._holds or code.co_name == "__enter__"
        if not self._holds or not is_of_request(code) or _is_elsewhere(frame):
            return
        if self._raises:  # a resumed coroutine raises only what it awaits raises
            counts = code.co_code[frame.f_lasti :].startswith(BEGINNING)
        else:  # what is not awaited takes no turn of the loop
            counts = bool(code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR))
        if not counts:
            return
        self._counts[code] += 1
        stage = (code, self._counts[code])
        if self._at is None:
            self._turns[stage] = self._turn
            self._goes_on.add(frame.f_back.f_code if frame.f_back else code)
        elif self._at == stage:
            sys.setprofile(None)
            self.acted = True
            try:
                self._act()
            except RuntimeError:
                _close_unbegun(frame.f_locals.values())
                raise

    def stages(self) -> list[Stage]:
        """The first and the last call of each function, where its failure differs from another's.

        A function that handles no exception passes on those of the functions that it calls, so
        these suffice. An action that does not raise shows when the task next waits: one for each
        turn of the loop.
        """
        if not self._raises:
            return list({turn: stage for stage, turn in self._turns.items()}.values())
        return [
            (code, n)
            for code, count in self._counts.items()
            if code.co_exceptiontable or code not in self._goes_on
            for n in sorted({1, count})
        ]


def _loop_under(frame: FrameType) -> FrameType | None:
    """Return the loop's frame, below a task's coroutines."""
    below: FrameType | None = frame
    while below is not None and below.f_code.co_flags & inspect.CO_COROUTINE:
        below = below.f_back
    return below


def _close_unbegun(arguments: Iterable[object]) -> None:
    """Close the coroutines given to a function that fails before it runs: Python would warn."""
    for one in arguments:
        if inspect.iscoroutine(one) and inspect.getcoroutinestate(one) == inspect.CORO_CREATED:
            one.close()
        elif isinstance(one, tuple):
            _close_unbegun(one)


def _is_elsewhere(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename.startswith((HOUSE, sys.base_prefix)):
        if frame.f_code.co_name in ELSEWHERE:
            return True
        frame = frame.f_back
    return False


class Door:
    """A server without sockets, called one request at a time, by a key that may have one open."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._number = 0
        self._tasks = asyncio.all_tasks()  # of the server and of the test

    async def ask(self, client: Client, profile: Profile | None = None) -> None:
        """Send a request, and check that nothing is left whatever happens."""
        running = self._running

        async def run() -> None:
            if profile is not None:
                profile.begin()
            try:
                await running.app(client.scope, client.receive, client.send)
            finally:
                sys.setprofile(None)

        task = asyncio.ensure_future(run())
        client.cancel = task.cancel
        await client.ended(task)
        await until(lambda: asyncio.all_tasks() <= self._tasks)
        running.server.use.begin("alice", 0).end()  # raises if its only place is taken
        assert running.server.num_open == 0

    def client(self, call: Call, **options: Any) -> Client:
        self._number += 1
        headers = {"authorization": "Bearer alice-secret-key-1"}
        if call.again:
            headers["idempotency-key"] = str(self._number)
        return Client(call, headers, **options)


@asynccontextmanager
async def door_of(serve: Serve, tmp_path: Path) -> AsyncIterator[Door]:
    keys, adapters = tmp_path / "keys", tmp_path / "adapters"
    keys.write_text("alice=alice-secret-key-1 parallel=1\n")
    keys.chmod(0o600)
    (adapters / "sql").mkdir(parents=True)
    (adapters / "sql" / "adapter_config.json").write_text("{}")
    options = {"api_key_file": str(keys)}
    async with serve(server=options, lora_dir=str(adapters), max_num_seqs=8) as running:
        headers = {"authorization": "Bearer alice-secret-key-1"}
        body = {"prompt": "a", "max_tokens": 1}
        first = await running.http.post("/v1/completions", json=body, headers=headers)
        assert first.status_code == 200, "what serving itself needs runs by now"
        yield Door(running)
        await until(running.idle)
        assert (await running.http.get("/ready")).status_code == 200


def broken() -> None:
    raise RuntimeError("this stage is broken")


WAYS: dict[str, Callable[[Client], object]] = {
    "exception": lambda client: broken(),
    "cancellation": lambda client: client.cancel(),
    "leaving": lambda client: client.gone.set(),
}


@pytest.mark.parametrize("way", WAYS)
async def test_a_route_that_fails_anywhere(serve: Serve, tmp_path: Path, way: str) -> None:
    failed, raises = 0, way == "exception"
    async with door_of(serve, tmp_path) as door:
        for call in CALLS:
            client, profile = door.client(call), Profile(raises=raises)
            await door.ask(client, profile)
            status = client.status
            assert status == 200 or (call.may_miss and status == 404), (str(call), client.content)
            for code, number in profile.stages():
                client = door.client(call)
                stage = Profile((code, number), partial(WAYS[way], client), raises=raises)
                try:
                    await door.ask(client, stage)
                except Exception as error:
                    error.add_note(f"{call} at call {number} of {code.co_qualname}")
                    raise
                failed += stage.acted
            client = door.client(call)
            await door.ask(client)
            assert client.status == status or call.may_miss, (str(call), client.content)
    assert failed > (20 if raises else 3) * len(CALLS), "stages were found and failed"


class BreakingSocket:
    """Takes so many messages of an answer, then fails at each."""

    def __init__(self, takes: int) -> None:
        self.left = takes
        self.failures = 0

    def __call__(self, message: Message) -> None:
        self.left -= 1
        if self.left < 0:
            self.failures += 1
            raise ConnectionResetError("the socket is broken")


async def test_a_socket_that_breaks_at_any_message(serve: Serve, tmp_path: Path) -> None:
    async with door_of(serve, tmp_path) as door:
        for call in CALLS:
            whole = door.client(call)
            await door.ask(whole)
            count = len(whole.messages)
            for takes in sorted({0, 1, count // 2, count - 1} - {count}):
                sock = BreakingSocket(takes)
                client = door.client(call, on_send=sock)
                try:
                    await door.ask(client)
                except Exception as error:
                    error.add_note(f"{call} after {takes} of {count} messages")
                    raise
                if takes < 2:  # the number of later messages varies: events come together
                    assert sock.failures, (str(call), takes)
                    assert len(client.messages) == takes
