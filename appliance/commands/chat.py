"""`appliance chat`: talks with a running server's model, or with one in this process."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.commands.asked_server import Config, Url, asked_server, require_models
from appliance.config import cache_dir
from appliance.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from appliance.chat.session import ChatSession


def chat(
    question: Annotated[
        str | None,
        typer.Argument(help="Ask this alone; - or a pipe reads the question from the input."),
    ] = None,
    system: Annotated[str, typer.Option(help="The system prompt.", show_default=False)] = "",
    model: Annotated[
        str | None,
        typer.Option(
            help="A model of the server; without a server, the one to run here: a folder, .gguf"
            " file or hub id.",
            show_default=False,
        ),
    ] = None,
    here: Annotated[
        bool, typer.Option("--here", help="Run the model here, whether or not a server runs.")
    ] = False,
    image: Annotated[
        list[Path] | None,
        typer.Option(help="A picture that goes with the first question; may be repeated."),
    ] = None,
    history: Annotated[
        bool, typer.Option("--history/--no-history", help="Keep questions for the arrow keys.")
    ] = True,
    url: Url = None,
    config: Config = None,
) -> None:
    """Talk with a model; /help lists what else can be typed.

    It is the model of a running server, whose address and key are those of the server's own
    settings, as for `appliance top`. Where no server answers, --model names the model that runs
    here, with the server's settings, until the chat ends.
    """
    if here and url is not None:
        raise ConfigError("--here needs no server and --url names one; leave one out")
    if question is None and not sys.stdin.isatty():
        question = "-"
    if question is not None:
        question = sys.stdin.read() if question == "-" else question
        if not question.strip():
            raise ConfigError("the question is empty")
    with contextlib.ExitStack() as ending:
        session = None if here else _with_server(url, config, model)
        if session is None:
            session = ending.enter_context(_with_own_model(model, config))
        session.conversation.system = system
        noted = session.attach(image or ())
        if question is None:
            if image:
                session.screen.note(noted)
            _talk(session, keep_history=history)
        else:
            session.shows_stats = False
            session.ask(question.strip())


def _talk(session: ChatSession, *, keep_history: bool) -> None:
    from appliance.chat.question_line import QuestionLine
    from appliance.chat.session import ORDERS

    line = QuestionLine(ORDERS, cache_dir() / "chat_history" if keep_history else None)
    session.screen.note(f"{session.where}; /help lists what can be typed")
    try:
        session.talk(line)
    finally:
        line.close()


def _with_server(url: str | None, config: Path | None, model: str | None) -> ChatSession | None:
    """Return a chat with the server; None if none answers and the user named a model to run.

    Raises:
        ConfigError: there is no server, or it lacks the model.
    """
    from appliance.chat.answer import ServerSource
    from appliance.chat.dialogue import Dialogue
    from appliance.chat.session import ChatSession
    from appliance.doctor.server_facts import ask_server

    server = asked_server(url, config)
    facts = asyncio.run(ask_server(server))
    if facts.problem is not None and url is None:
        if model is not None:
            return None
        raise ConfigError(
            f"no answer from {server.url}: {facts.problem}; start a server with `appliance serve`,"
            " or run a model here with --model MODEL, or the default one with --here"
        )
    require_models(server, facts)
    if model is not None and model not in facts.models:
        raise ConfigError(
            f"the server has no {model!r}; it has {', '.join(facts.models)}; --here runs a model"
            " beside it"
        )
    talk = Dialogue(model or facts.models[0])
    source = ServerSource(server)
    where = f"{talk.model} at {server.url}"
    return ChatSession(source, talk, facts.models, facts.context_length, where)


@contextlib.contextmanager
def _with_own_model(model: str | None, config: Path | None) -> Iterator[ChatSession]:
    """Load a model with the server's settings; the context ends it.

    Raises:
        ApplianceError: the model cannot be found, fetched or loaded.
    """
    from appliance import log
    from appliance.chat.dialogue import Dialogue
    from appliance.chat.session import ChatSession
    from appliance.config import load_settings, with_cache_folders
    from appliance.hub.found_model import find_model_of
    from appliance.progress.progress import ProgressLine
    from appliance.server.own_model import OwnModel

    settings = with_cache_folders(load_settings({"model": model}, config))
    log.configure("warning")
    with ProgressLine() as progress:
        found, engine = find_model_of(settings.served[0].engine, progress)
        own = OwnModel(engine, found, progress)
    with own:
        where = f"{own.models[0]}, which runs here"
        talk = Dialogue(own.models[0])
        yield ChatSession(own, talk, own.models, own.info.context_length, where)
