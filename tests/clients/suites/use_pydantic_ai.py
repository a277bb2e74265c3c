"""pydantic-ai's agents."""

from __future__ import annotations

import asyncio

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from steps import arguments, passed, version

URL, MODEL = arguments()


class City(BaseModel):
    """A city."""

    city: str = Field(max_length=20)
    people: int = Field(ge=0, le=99)


async def main() -> None:
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key="none"))
    version("pydantic-ai-slim")
    agent = Agent(model, model_settings={"max_tokens": 8, "temperature": 0, "timeout": 600})
    answer = await agent.run("Say hello.")
    assert answer.output
    passed("chat")

    async with agent.run_stream("Say hello.") as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True)]
    assert "".join(pieces).strip() == answer.output.strip()
    passed("streaming")

    settings = {"max_tokens": 80, "temperature": 0, "timeout": 600}
    typed = Agent(model, output_type=NativeOutput(City), model_settings=settings)
    assert isinstance((await typed.run("Paris has two million people.")).output, City)
    passed("schema")

    called = Agent(model, output_type=City, model_settings=settings)  # by a required tool call
    assert isinstance((await called.run("Paris has two million people.")).output, City)
    passed("tool call")

    long = {"max_tokens": 2000, "extra_body": {"ignore_eos": True}, "timeout": 600}
    async with Agent(model, model_settings=long).run_stream("Count for ever.") as stream:
        async for _ in stream.stream_text(delta=True, debounce_by=None):
            break
    passed("cancel")

    try:
        await agent.run("Say hello.", model_settings={"temperature": 9})
    except ModelHTTPError as error:
        assert error.status_code == 400
        assert "temperature" in str(error.body)
        passed("error")


asyncio.run(main())
