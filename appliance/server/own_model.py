"""A model for this process alone: a server without HTTP, in its own thread."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from appliance.config import ServerConfig
from appliance.engine.process.client import EngineClient
from appliance.engine.process.launch import ENGINE_COMMAND
from appliance.errors import ModelError
from appliance.server.http.body import decode_json
from appliance.server.models.model_state import ModelState
from appliance.server.models.state import ServerState
from appliance.server.openai.chat import ChatCalls, answer_chat, chat_frames
from appliance.server.openai.chunks import StreamUsage
from appliance.server.requests.schema import ChatRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.config import EngineConfig
    from appliance.engine.nouns.messages import EngineInfo
    from appliance.engine.process.supervisor import ProgressCallback
    from appliance.server.models.model_state import FoundModel

ResultT = TypeVar("ResultT")


class OwnModel:
    """A loaded model and its engine process; as a context manager it ends both.

    Use it from one outside thread, for one question at a time.

    Args:
        engine: its settings; ignores replicas.
        on_progress: called with stage, done, total, in another thread.

    Raises:
        ApplianceError: loading fails, or the model is not for chats.
    """

    def __init__(
        self,
        engine: EngineConfig,
        found: FoundModel,
        on_progress: ProgressCallback,
        *,
        engine_command: Sequence[str] = ENGINE_COMMAND,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="own-model")
        self._thread.start()
        config = msgspec.structs.replace(engine, model=str(found.path), replicas=1)
        try:
            self._model = self._call(_make(config, found, engine_command))
            self.info: EngineInfo = self._call(_load(self._model, on_progress))
        except BaseException:
            self.close()
            raise

    @property
    def models(self) -> tuple[str, ...]:
        """The model's id, alone."""
        return (self._model.model_id,)

    async def events(self, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        """Yield the answer to an OpenAI chat as server-sent events.

        Raises:
            ApplianceError: the request is refused, or the engine fails.
        """
        here = asyncio.get_running_loop()
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()

        def put(frame: bytes | None) -> None:
            with suppress(RuntimeError):  # the caller's loop has closed
                here.call_soon_threadsafe(queue.put_nowait, frame)

        answering = asyncio.run_coroutine_threadsafe(_answer(self._model, body, put), self._loop)
        try:
            while (frame := await queue.get()) is not None:
                yield frame
            await asyncio.wrap_future(answering)
        finally:
            answering.cancel()

    def close(self) -> None:
        """End the engine process and wait for it."""
        if not self._thread.is_alive():
            return
        if (model := getattr(self, "_model", None)) is not None:
            self._call(_close(model))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> OwnModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _make(config: EngineConfig, found: FoundModel, command: Sequence[str]) -> ModelState:
    state = ServerState(ServerConfig())
    state.models.append(ModelState(state, EngineClient(config, command=command), found, found.name))
    await state.default.engine.prepare()
    return state.default


async def _load(model: ModelState, on_progress: ProgressCallback) -> EngineInfo:
    info = await model.begin_loading(on_progress)
    model.server.is_up = True
    _, tokenizer = model.serving()
    if tokenizer.chat_template is None:
        raise ModelError(
            f"{model.model_id} has no chat template, so one cannot talk with it; `appliance serve`"
            " continues texts with it, or embeds them"
        )
    return info


async def _close(model: ModelState) -> None:
    await model.close()
    model.server.texts.close()


async def _answer(
    model: ModelState, body: dict[str, Any], put: Callable[[bytes | None], None]
) -> None:
    try:
        asked, _ = decode_json(json.dumps(body).encode(), ChatRequest)
        owner = next(iter(model.server.keys()), "")
        answer, exchange = await answer_chat(model, asked, owner, request_id="chat")
        calls, usage = ChatCalls.of(asked), StreamUsage.of(asked, model.config)
        with answer:
            async for frame in chat_frames(exchange, answer, calls=calls, usage=usage):
                put(frame)
    finally:
        put(None)
