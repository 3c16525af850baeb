"""Ask for a class in each of instructor's modes; print the results as JSON.

Run by an environment of its own, with the endpoint's URL and the names of modes as arguments.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field


class Place(BaseModel):
    """A town."""

    city: Annotated[str, Field(max_length=20)]
    inhabitants: Annotated[int, Field(ge=0, le=99_999_999)]


def ask(mode: instructor.Mode, url: str) -> dict[str, Any]:
    openai = OpenAI(base_url=url, api_key="none", max_retries=0)
    client = instructor.from_openai(openai, mode=mode)
    place, completion = client.chat.completions.create_with_completion(
        model=openai.models.list().data[0].id,
        response_model=Place,
        max_retries=0,
        temperature=0,
        max_tokens=200,
        messages=[{"role": "user", "content": "Where is the Eiffel tower? Say only the city."}],
    )
    assert isinstance(place, Place)
    return {"given": place.model_dump(), "reason": completion.choices[0].finish_reason}


def main(url: str, *modes: str) -> None:
    answers = {name: ask(instructor.Mode[name], url) for name in modes}
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
