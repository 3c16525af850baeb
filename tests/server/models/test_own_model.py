"""A model for this process alone, served by the engine that repeats its prompt."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path

import psutil
import pytest
from support.echo.echo_engine import ECHO

from appliance.chat.answer import ChatAnswer, NoAnswerError, fetch_answer
from appliance.chat.dialogue import Dialogue, Turn
from appliance.config import EngineConfig
from appliance.errors import MemoryPlanError, ModelError
from appliance.server.own_model import OwnModel
from tests.server.conftest import Found


def own_model(folder: Path, knobs: str = "") -> OwnModel:
    command = (*ECHO, knobs) if knobs else ECHO
    config = EngineConfig(max_num_seqs=1)
    return OwnModel(config, Found(folder, "echo"), lambda *_: None, engine_command=command)


def children() -> set[psutil.Process]:
    return set(psutil.Process().children())


async def ask(own: OwnModel, question: str, **sampling: float) -> ChatAnswer:
    answer = ChatAnswer()
    await fetch_answer(
        own, Dialogue("echo", "", sampling).body(Turn(question)), answer, lambda *_: None
    )
    return answer


def threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == "own-model"]


def test_it_answers_and_ends_with_its_process(tokenizer_folder: Path) -> None:
    before = children()
    with own_model(tokenizer_folder) as own:
        assert (own.models, own.info.context_length) == (("echo",), 512)
        assert len(children() - before) == 1
        answer = asyncio.run(ask(own, "hé"))
        with pytest.raises(NoAnswerError, match="512"):
            asyncio.run(ask(own, "x" * 600))
        with pytest.raises(NoAnswerError, match="temperature"):
            asyncio.run(ask(own, "q", temperature=9))
    assert (answer.text, answer.finish_reason) == ("user\nhé", "stop")
    assert answer.prompt_tokens > 0
    assert children() <= before  # of other tests in this process
    assert threads() == []


def test_an_answer_that_is_stopped_makes_room_for_the_next(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    async def stop(own: OwnModel) -> None:
        came = asyncio.Event()
        body = Dialogue("echo").body(Turn("ab" * 100))
        asking = asyncio.create_task(
            fetch_answer(own, body, ChatAnswer(), lambda *_: came.set()), name="asking"
        )
        await came.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    with own_model(tokenizer_folder, f"holds_at=260 until={tmp_path / 'gate'}") as own:
        asyncio.run(stop(own))
        assert asyncio.run(ask(own, "next")).text == "user\nnext"


@pytest.mark.parametrize("knobs", ["does_not_fit", ""])
def test_one_that_cannot_be_loaded_leaves_nothing(
    tokenizer_folder: Path, tmp_path: Path, knobs: str
) -> None:
    before = children()
    folder, error = (tokenizer_folder, MemoryPlanError) if knobs else (tmp_path, ModelError)
    with pytest.raises(error):
        own_model(folder, knobs)
    assert children() <= before  # of other tests in this process
    assert threads() == []


def test_one_without_a_chat_template_is_refused(tokenizer_folder: Path, tmp_path: Path) -> None:
    shutil.copy(tokenizer_folder / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    before = children()
    with pytest.raises(ModelError, match="has no chat template"):
        own_model(tmp_path)
    assert children() <= before  # of other tests in this process
