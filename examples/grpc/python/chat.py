"""A synchronous client: python examples/grpc/python/chat.py 127.0.0.1:8001"""

import sys

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from protos import common_pb2, inference_pb2, inference_pb2_grpc


def ask(text: str, **sampling: float) -> inference_pb2.ChatRequest:
    message = common_pb2.ChatMessage(role="user", content=text)
    return inference_pb2.ChatRequest(
        chat=common_pb2.ChatPrompt(messages=[message]),
        options=inference_pb2.GenerationOptions(sampling=common_pb2.SamplingParams(**sampling)),
    )


def main(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for model in stub.ListModels(inference_pb2.ListModelsRequest()).models:
            print("model:", model.id, model.max_model_len)

        # A stream, with a deadline of a minute for the whole answer.
        print("chat: ", end="")
        for answer in stub.Chat(ask("Hello!", temperature=0, max_tokens=16), timeout=60):
            for piece in answer.pieces:
                print(piece.text, end="", flush=True)
                if piece.finish_reason:
                    print("\nfinish:", common_pb2.FinishReason.Name(piece.finish_reason))
            if answer.HasField("usage"):
                print("usage:", answer.usage.prompt_tokens, answer.usage.completion_tokens)

        # To cancel, cancel the call: the work stops at the worker.
        call = stub.Chat(ask("Count for ever.", max_tokens=4000))
        next(call)
        call.cancel()
        print("cancelled:", call.code().name)

        # An error has a status, a sentence, and details.
        try:
            list(stub.Chat(ask("Hello!", temperature=9)))
        except grpc.RpcError as error:
            print("error:", error.code().name)
            for detail in rpc_status.from_call(error).details:
                if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
                    request = error_details_pb2.BadRequest.FromString(detail.value)
                    print("field:", request.field_violations[0].field)


if __name__ == "__main__":
    main(sys.argv[1])
