"""instructor: typed answers, by a schema and by a tool call."""

from __future__ import annotations

import instructor
import openai
from pydantic import BaseModel, Field
from steps import arguments, passed, version

URL, MODEL = arguments()


class City(BaseModel):
    """A city."""

    city: str = Field(max_length=20)
    people: int


def client(mode: instructor.Mode) -> instructor.Instructor:
    sdk = openai.OpenAI(base_url=URL, api_key="none", max_retries=0, timeout=600)
    return instructor.from_openai(sdk, mode=mode)


ASK = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Paris has two million people."}],
    "max_tokens": 80,
    "max_retries": 0,
}

version("instructor")
for mode, step in (
    (instructor.Mode.JSON_SCHEMA, "chat, schema"),
    (instructor.Mode.TOOLS, "tool call"),
):
    answer = client(mode).chat.completions.create(response_model=City, **ASK)
    assert isinstance(answer, City)
    passed(step)

parts = list(
    client(instructor.Mode.JSON_SCHEMA).chat.completions.create_partial(response_model=City, **ASK)
)
assert parts[-1].city is not None
assert parts[-1].people is not None
passed("streaming")

stream = client(instructor.Mode.JSON_SCHEMA).chat.completions.create_partial(
    response_model=City, **ASK
)
next(stream)
stream.close()
passed("cancel")

try:
    client(instructor.Mode.JSON_SCHEMA).chat.completions.create(
        response_model=City, temperature=9, **ASK
    )
except Exception as error:  # its own kinds, around the SDK's
    assert "temperature" in str(error), error
    passed("error")
