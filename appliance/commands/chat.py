"""`appliance chat`: talks with the model of a running server."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import typer

from appliance.commands.asked_server import Config, Url, asked_server, require_models
from appliance.config import cache_dir
from appliance.errors import ConfigError


def chat(
    question: Annotated[
        str | None,
        typer.Argument(help="Ask this alone; - or a pipe reads the question from the input."),
    ] = None,
    system: Annotated[str, typer.Option(help="The system prompt.", show_default=False)] = "",
    model: Annotated[
        str | None, typer.Option(help="A model of the server; without it, its first.")
    ] = None,
    history: Annotated[
        bool, typer.Option("--history/--no-history", help="Keep questions for the arrow keys.")
    ] = True,
    url: Url = None,
    config: Config = None,
) -> None:
    """Talk with the model of a running server; /help lists what else can be typed.

    Address and key are those of the server's own settings, as for `appliance top`.
    """
    from appliance.chat.dialogue import Dialogue
    from appliance.chat.session import ChatSession
    from appliance.doctor.server_facts import ask_server

    server = asked_server(url, config)
    facts = asyncio.run(ask_server(server))
    require_models(server, facts)
    if model is not None and model not in facts.models:
        raise ConfigError(f"the server has no {model!r}; it has {', '.join(facts.models)}")
    talk = Dialogue(model or facts.models[0], system)
    session = ChatSession(server, talk, facts.models, facts.context_length)
    if question is None and not sys.stdin.isatty():
        question = "-"
    if question is not None:
        question = sys.stdin.read() if question == "-" else question
        if not question.strip():
            raise ConfigError("the question is empty")
        session.shows_stats = False
        session.ask(question.strip())
        return
    from appliance.chat.orders import ORDERS
    from appliance.chat.question_line import QuestionLine

    line = QuestionLine(ORDERS, cache_dir() / "chat_history" if history else None)
    session.screen.note(f"{talk.model} at {server.url}; /help lists what can be typed")
    try:
        session.talk(line)
    finally:
        line.close()
