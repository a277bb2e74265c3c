"""A stub of an SGLang worker for smg: `SglangScheduler.Generate` over gRPC, a token a message.

    python -m bench.peers.smg_worker --port 9001 --model DIR --tokens 1,2,3 --report /tmp/sent.json

Runs in the peer's interpreter, where smg-grpc-proto is installed.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import uvloop
from smg_grpc_proto import sglang_scheduler_pb2, sglang_scheduler_pb2_grpc

from bench.peers.steps import NAME, Steps


class StubScheduler(sglang_scheduler_pb2_grpc.SglangSchedulerServicer):  # type: ignore[misc]
    """Every call is a stream of its own; paced ones share the beat of `Steps`."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._model = options.model
        tokens = [int(token) for token in options.tokens.split(",")]
        self._steps = Steps(tokens, Path(options.report))

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        sampling = request.sampling_params
        name = object()
        self._steps.add(name, sampling.max_new_tokens, sampling.top_p)
        num_prompt = len(request.tokenized.input_ids)
        token_ids: list[int] = []
        last = False
        try:
            while not last:
                if pause := self._steps.pause_of(name):
                    await asyncio.sleep(pause)  # the device at work
                token_id, last = self._steps.take_one(name, self._steps.beat_at())
                token_ids.append(token_id)
                chunk = sglang_scheduler_pb2.GenerateStreamChunk(
                    token_ids=[token_id],
                    prompt_tokens=num_prompt,
                    completion_tokens=len(token_ids),
                )
                yield sglang_scheduler_pb2.GenerateResponse(
                    request_id=request.request_id, chunk=chunk
                )
            complete = sglang_scheduler_pb2.GenerateComplete(
                output_ids=token_ids,
                finish_reason="length",
                prompt_tokens=num_prompt,
                completion_tokens=len(token_ids),
            )
            yield sglang_scheduler_pb2.GenerateResponse(
                request_id=request.request_id, complete=complete
            )
        finally:
            self._steps.drop(name)

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        return sglang_scheduler_pb2.HealthCheckResponse(healthy=True, message="ok")

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        return sglang_scheduler_pb2.GetModelInfoResponse(
            model_path=self._model,
            tokenizer_path=self._model,
            served_model_name=NAME,
            is_generation=True,
            vocab_size=49152,
            max_context_length=1 << 20,
        )

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        return sglang_scheduler_pb2.GetServerInfoResponse()


async def serve(options: argparse.Namespace) -> None:
    """Serves until the process ends."""
    server = grpc.aio.server()
    servicer = StubScheduler(options)
    sglang_scheduler_pb2_grpc.add_SglangSchedulerServicer_to_server(servicer, server)
    server.add_insecure_port(f"127.0.0.1:{options.port}")
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


def main() -> None:
    """Runs until a signal."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--report", required=True)
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
