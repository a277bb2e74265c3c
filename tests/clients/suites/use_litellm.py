"""litellm, speaking to an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json

import litellm
from steps import SCHEMA, arguments, passed, version

URL, MODEL = arguments()
COMMON = {
    "model": f"openai/{MODEL}",
    "api_base": URL,
    "api_key": "none",
    "timeout": 600,
    "num_retries": 0,
    "messages": [{"role": "user", "content": "Say hello."}],
}
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "city", "schema": SCHEMA, "strict": True},
}

version("litellm")
answer = litellm.completion(**COMMON, max_tokens=8, temperature=0)
assert answer.choices[0].message.content
passed("chat")

stream = litellm.completion(**COMMON, max_tokens=8, temperature=0, stream=True)
text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
assert text == answer.choices[0].message.content
passed("streaming")

made = litellm.completion(**COMMON, max_tokens=80, temperature=0, response_format=FORMAT)
assert set(json.loads(made.choices[0].message.content)) == {"city", "people"}
passed("schema")


async def cancel() -> None:
    stream = await litellm.acompletion(
        **COMMON, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(aiter(stream))
    await stream.completion_stream.close()


asyncio.run(cancel())
passed("cancel")

try:
    litellm.completion(**COMMON, temperature=9)
except litellm.BadRequestError as error:
    assert "temperature" in str(error)
    passed("error")
