"""Structured output through a whole fleet: OpenAI's SDK, vLLM's fields, gRPC, and errors."""

from __future__ import annotations

import json
import os
import re
import signal
from typing import Any, Literal

import grpc
import httpx
import openai
import pytest
from jsonschema import validate
from pydantic import BaseModel

from protos import common_pb2, inference_pb2, inference_pb2_grpc
from tests.integration.served import ServedFleet

QUESTION = [{"role": "user", "content": "Tell me about Paris as JSON: its name and population."}]


class City(BaseModel):
    name: str
    population: int
    continent: Literal["Europe", "Asia", "Africa"]


def ask(fleet: ServedFleet, status: int = 200, **fields: Any) -> Any:
    body = {"prompt": "x", "max_tokens": 400, "temperature": 0, **fields}
    response = httpx.post(f"{fleet.url}/v1/completions", json=body, timeout=120)
    assert response.status_code == status, response.text
    return response.json()


def text_of(answer: Any) -> str:
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop"]
    text: str = answer["choices"][0]["text"]
    return text


def test_the_sdk_parses_what_the_embedded_model_says(fleet: ServedFleet) -> None:
    client = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="unused", max_retries=0)
    model = client.models.list().data[0].id
    whole = client.chat.completions.parse(
        model=model,
        messages=QUESTION,  # type: ignore[arg-type]
        response_format=City,
        temperature=0,
        max_tokens=120,
    )
    city = whole.choices[0].message.parsed
    assert isinstance(city, City)
    with client.chat.completions.stream(
        model=model,
        messages=QUESTION,  # type: ignore[arg-type]
        response_format=City,
        temperature=0,
        max_tokens=120,
    ) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert len(pieces) > 3
    assert final.choices[0].message.parsed == city
    assert "".join(pieces) == whole.choices[0].message.content


def test_every_kind_holds_through_the_fleet(fake_fleet: ServedFleet) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["n"],
        "additionalProperties": False,
    }
    validate(json.loads(text_of(ask(fake_fleet, guided_json=schema))), schema)
    assert re.fullmatch("[a-d]{20}", text_of(ask(fake_fleet, guided_regex="[a-d]{20}")))
    assert text_of(ask(fake_fleet, guided_choice=["yes", "no"])) in ("yes", "no")
    assert text_of(ask(fake_fleet, ebnf='root ::= "a" [0-9]{3}')).startswith("a")
    assert text_of(ask(fake_fleet, structured_outputs={"grammar": 'start: "b"'})) == "b"


def test_a_bad_grammar_is_a_400_that_names_its_field(fake_fleet: ServedFleet) -> None:
    schema = {"type": "array", "uniqueItems": True}
    format = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    for stream in (False, True):
        error = ask(fake_fleet, 400, response_format=format, stream=stream)["error"]
        assert error["param"] == "response_format"
        assert "uniqueItems" in error["message"]
        assert error["type"] == "invalid_request_error"
    error = ask(fake_fleet, 400, structured_outputs={"regex": "a?" * 40_000})["error"]
    assert error["param"] == "structured_outputs.regex"
    assert "to compile" in error["message"]
    assert text_of(ask(fake_fleet, guided_choice=["fine"])) == "fine"
    refused = fake_fleet.total("worker", "shoal_worker_grammars_refused_total")
    assert refused >= 2


def test_grpc_takes_grammars(fake_fleet: ServedFleet) -> None:
    address = fake_fleet.processes("gateway")[0]["address"]
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)

        def generate(grammar: common_pb2.Grammar) -> str:
            sampling = common_pb2.SamplingParams(max_tokens=100, grammar=grammar)
            options = inference_pb2.GenerationOptions(sampling=sampling)
            request = inference_pb2.GenerateRequest(text="x", options=options)
            return "".join(
                piece.text for answer in stub.Generate(request) for piece in answer.pieces
            )

        choices = common_pb2.Choices(texts=["left", "right"])
        assert generate(common_pb2.Grammar(choices=choices)) in ("left", "right")
        with pytest.raises(grpc.RpcError) as caught:
            generate(common_pb2.Grammar(regex="(a"))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_the_embedded_model_never_loops_on_whitespace(fleet: ServedFleet) -> None:
    """A line end and blanks are what a small model likes to write for ever."""
    answer = ask(
        fleet,
        prompt="{\n\n\n\n\n\n\n\n\n\n",
        response_format={"type": "json_object"},
        max_tokens=60,
        logit_bias={"198": 100},  # the line end
    )
    text = answer["choices"][0]["text"]
    assert not re.search(r"\n\s*\n|[ \n]{18}", text)


def test_a_constrained_stream_goes_on_where_its_worker_died(fake_fleet: ServedFleet) -> None:
    pattern = "([a-d]{3} ){150}end"
    body: dict[str, Any] = {
        "prompt": "x",
        "max_tokens": 900,
        "seed": 3,
        "guided_regex": pattern,
    }
    undisturbed = text_of(ask(fake_fleet, **body))
    assert re.fullmatch(pattern, undisturbed)
    text, killed = "", False
    finishes: list[str] = []
    request = {**body, "temperature": 0, "stream": True}
    url = f"{fake_fleet.url}/v1/completions"
    with httpx.stream("POST", url, json=request, timeout=120) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            text += choice["text"]
            finishes += [choice["finish_reason"]] if choice["finish_reason"] else []
            if len(text) > 100 and not killed:
                killed = True
                for worker in fake_fleet.processes("worker"):
                    os.kill(worker["pid"], signal.SIGKILL)
    assert killed
    assert (text, finishes) == (undisturbed, ["stop"])
    assert fake_fleet.total("gateway", "shoal_gateway_resumes_total", peer="worker") >= 1
