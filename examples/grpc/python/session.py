"""Many generations on one stream: python examples/grpc/python/session.py 127.0.0.1:8001"""

import asyncio
import sys
from collections import defaultdict

import grpc

from protos import common_pb2, inference_pb2, inference_pb2_grpc

NUM_GENERATIONS = 100


def start(number: int) -> inference_pb2.SessionStart:
    """One generation; `id` is ours to choose, and names it in all that comes back."""
    sampling = common_pb2.SamplingParams(temperature=0, max_tokens=16)
    options = inference_pb2.GenerationOptions(sampling=sampling)
    request = inference_pb2.GenerateRequest(text=f"Number {number} is", options=options)
    return inference_pb2.SessionStart(id=number, generate=request, deadline_ms=60_000)


async def main(address: str) -> None:
    texts: dict[int, str] = defaultdict(str)
    ends: dict[int, str] = {}
    async with grpc.aio.insecure_channel(address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Session()
        starts = [start(number) for number in range(NUM_GENERATIONS)]
        await call.write(inference_pb2.SessionRequest(starts=starts))
        await call.write(inference_pb2.SessionRequest(cancels=[7]))
        await call.done_writing()  # what runs goes on to its end, and then the stream ends
        while response := await call.read():
            for refusal in response.refused:
                print("refused:", refusal.id, refusal.error.message)
            for update in response.updates:  # of every generation with news, one each
                for piece in update.pieces:
                    texts[update.id] += piece.text
                if update.WhichOneof("end") == "usage":
                    ends[update.id] = "finished"
                elif update.WhichOneof("end") == "error":
                    ends[update.id] = common_pb2.ErrorCode.Name(update.error.code)
    print("first:", texts[0])
    print("finished:", sum(end == "finished" for end in ends.values()))
    print("cancelled:", ends[7])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
