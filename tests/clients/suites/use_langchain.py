"""langchain-openai's chat model."""

from __future__ import annotations

import openai
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
from steps import arguments, passed, version

URL, MODEL = arguments()


class City(BaseModel):
    """A city."""

    city: str = Field(max_length=20)
    people: int = Field(ge=0, le=99)


def chat(**options: object) -> ChatOpenAI:
    options = {"max_tokens": 80, "temperature": 0, **options}
    return ChatOpenAI(
        base_url=URL, api_key="none", model=MODEL, max_retries=0, timeout=600, **options
    )


version("langchain-openai")
answer = chat(max_tokens=8, temperature=0).invoke("Say hello.")
assert answer.content
assert answer.usage_metadata["output_tokens"] <= 8
passed("chat")

chunks = list(chat(max_tokens=8, temperature=0).stream("Say hello."))
assert "".join(chunk.content for chunk in chunks) == answer.content
passed("streaming")

called = chat().bind_tools([City], tool_choice="City").invoke("Paris has two million people.")
(call,) = called.tool_calls
assert City(**call["args"])
passed("tool call")

structured = chat().with_structured_output(City, method="json_schema")
assert isinstance(structured.invoke("Paris has two million people."), City)
passed("schema")

stream = chat(max_tokens=2000, extra_body={"ignore_eos": True}).stream("Count for ever.")
next(stream)
stream.close()
passed("cancel")

try:
    chat(temperature=9).invoke("Say hello.")
except openai.BadRequestError as error:
    assert error.param == "temperature"
    passed("error")
