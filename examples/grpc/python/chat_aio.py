"""An asyncio client: python examples/grpc/python/chat_aio.py 127.0.0.1:8001"""

import asyncio
import sys

import grpc
from google.rpc import error_details_pb2
from grpc_status.rpc_status import GRPC_DETAILS_METADATA_KEY, status_pb2

from protos import common_pb2, inference_pb2, inference_pb2_grpc


def ask(text: str, **sampling: float) -> inference_pb2.ChatRequest:
    message = common_pb2.ChatMessage(role="user", content=text)
    return inference_pb2.ChatRequest(
        chat=common_pb2.ChatPrompt(messages=[message]),
        options=inference_pb2.GenerationOptions(sampling=common_pb2.SamplingParams(**sampling)),
    )


async def main(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        models = await stub.ListModels(inference_pb2.ListModelsRequest())
        for model in models.models:
            print("model:", model.id, model.max_model_len)

        print("chat: ", end="")
        async for answer in stub.Chat(ask("Hello!", temperature=0, max_tokens=16), timeout=60):
            for piece in answer.pieces:
                print(piece.text, end="", flush=True)
                if piece.finish_reason:
                    print("\nfinish:", common_pb2.FinishReason.Name(piece.finish_reason))
            if answer.HasField("usage"):
                print("usage:", answer.usage.prompt_tokens, answer.usage.completion_tokens)

        call = stub.Chat(ask("Count for ever.", max_tokens=4000))
        await call.read()
        call.cancel()
        print("cancelled:", (await call.code()).name)

        try:
            async for _ in stub.Chat(ask("Hello!", temperature=9)):
                pass
        except grpc.aio.AioRpcError as error:
            print("error:", error.code().name)
            trailers = dict(error.trailing_metadata())
            status = status_pb2.Status.FromString(trailers[GRPC_DETAILS_METADATA_KEY])
            for detail in status.details:
                if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
                    request = error_details_pb2.BadRequest.FromString(detail.value)
                    print("field:", request.field_violations[0].field)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
