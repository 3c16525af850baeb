"""instructor: a tool that it names, a schema, and JSON that only the prompt describes."""

from __future__ import annotations

import contextlib
import json
from typing import Annotated, Literal

import instructor
import pytest
from instructor.core import InstructorRetryException
from openai import OpenAI
from pydantic import BaseModel, Field

pytestmark = pytest.mark.model


class Ticket(BaseModel):
    """A fault that somebody reports."""

    room: Literal["kitchen", "cellar", "bath"]
    severity: int = Field(ge=1, le=5)
    words: list[Annotated[str, Field(max_length=12)]] = Field(max_length=3)


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_an_object_of_the_class_asked_for_comes_back(base_url: str, mode: instructor.Mode) -> None:
    with OpenAI(base_url=base_url, api_key="none", max_retries=0) as openai:
        client = instructor.from_openai(openai, mode=mode)
        ticket = client.chat.completions.create(
            model="small",
            response_model=Ticket,
            messages=[{"role": "user", "content": "The tap in the kitchen drips a little."}],
            max_retries=0,
            max_tokens=200,
            temperature=0,
        )
    assert isinstance(ticket, Ticket)
    assert ticket.room in {"kitchen", "cellar", "bath"}


class Town(BaseModel):
    city: str


def test_json_that_only_the_prompt_describes_is_json_at_least(base_url: str) -> None:
    """Nothing but the prompt names the fields in this mode, and a small model may not heed it."""
    with OpenAI(base_url=base_url, api_key="none", max_retries=0) as openai:
        client = instructor.from_openai(openai, mode=instructor.Mode.JSON)
        said: list[str] = []
        client.on(
            "completion:response", lambda answer: said.append(answer.choices[0].message.content)
        )
        with contextlib.suppress(InstructorRetryException):
            client.chat.completions.create(
                model="small",
                response_model=Town,
                messages=[{"role": "user", "content": "Oslo."}],
                max_retries=0,
                max_tokens=200,
                temperature=0,
            )
    (text,) = said
    assert isinstance(json.loads(text), dict)
