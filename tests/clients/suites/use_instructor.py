"""instructor: typed answers, by a schema and by a tool call."""

from __future__ import annotations

import asyncio

import instructor
import openai
from pydantic import BaseModel, Field
from steps import arguments, passed, version

URL, MODEL = arguments()


class City(BaseModel):
    """A city."""

    city: str = Field(max_length=20)
    people: int = Field(ge=0, le=99)


def client(mode: instructor.Mode) -> instructor.Instructor:
    sdk = openai.OpenAI(base_url=URL, api_key="none", max_retries=0, timeout=600)
    return instructor.from_openai(sdk, mode=mode)


ASK = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Paris has two million people."}],
    "max_tokens": 200,
    "seed": 1,
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


async def cancel() -> None:
    sdk = openai.AsyncOpenAI(base_url=URL, api_key="none", max_retries=0, timeout=600)
    patched = instructor.from_openai(sdk, mode=instructor.Mode.JSON_SCHEMA)
    stream = patched.chat.completions.create_partial(response_model=City, **ASK)
    await anext(aiter(stream))
    await stream.aclose()


asyncio.run(cancel())
passed("cancel")

try:
    client(instructor.Mode.JSON_SCHEMA).chat.completions.create(
        response_model=City, **{**ASK, "temperature": 9}
    )
except Exception as error:  # its own kinds, around the SDK's
    assert "temperature" in str(error), error
    passed("error")
