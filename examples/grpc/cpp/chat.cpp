// A C++ client: make -C examples/grpc/cpp && examples/grpc/cpp/build/chat 127.0.0.1:8001
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <iostream>
#include <string>

#include "protos/inference.grpc.pb.h"

namespace v1 = shoal::v1;

v1::ChatRequest Ask(const std::string& text, float temperature, uint32_t max_tokens) {
  v1::ChatRequest request;
  v1::ChatMessage* message = request.mutable_chat()->add_messages();
  message->set_role("user");
  message->set_content(text);
  v1::SamplingParams* sampling = request.mutable_options()->mutable_sampling();
  sampling->set_temperature(temperature);
  sampling->set_max_tokens(max_tokens);
  return request;
}

const char* Name(grpc::StatusCode code) {
  switch (code) {
    case grpc::OK: return "OK";
    case grpc::CANCELLED: return "CANCELLED";
    case grpc::INVALID_ARGUMENT: return "INVALID_ARGUMENT";
    case grpc::DEADLINE_EXCEEDED: return "DEADLINE_EXCEEDED";
    case grpc::RESOURCE_EXHAUSTED: return "RESOURCE_EXHAUSTED";
    case grpc::UNAVAILABLE: return "UNAVAILABLE";
    default: return "OTHER";
  }
}

void ListModels(v1::Inference::Stub& stub) {
  grpc::ClientContext context;
  v1::ListModelsResponse response;
  grpc::Status status = stub.ListModels(&context, v1::ListModelsRequest(), &response);
  if (!status.ok()) throw std::runtime_error(status.error_message());
  for (const v1::ModelCard& model : response.models()) {
    std::cout << "model: " << model.id() << " " << model.max_model_len() << "\n";
  }
}

void Chat(v1::Inference::Stub& stub) {
  grpc::ClientContext context;  // with a deadline of a minute for the whole answer
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(1));
  auto stream = stub.Chat(&context, Ask("Hello!", 0, 16));
  v1::ChatResponse response;
  std::cout << "chat: ";
  while (stream->Read(&response)) {
    for (const v1::GenerationPiece& piece : response.pieces()) {
      std::cout << piece.text() << std::flush;
      if (piece.finish_reason() != v1::FINISH_REASON_UNSPECIFIED) {
        std::cout << "\nfinish: " << v1::FinishReason_Name(piece.finish_reason()) << "\n";
      }
    }
    if (response.has_usage()) {
      std::cout << "usage: " << response.usage().prompt_tokens() << " "
                << response.usage().completion_tokens() << "\n";
    }
  }
  grpc::Status status = stream->Finish();
  if (!status.ok()) throw std::runtime_error(status.error_message());
}

void Cancel(v1::Inference::Stub& stub) {
  grpc::ClientContext context;
  auto stream = stub.Chat(&context, Ask("Count for ever.", 1, 4000));
  v1::ChatResponse response;
  stream->Read(&response);
  context.TryCancel();  // the work stops at the worker
  while (stream->Read(&response)) {
  }
  std::cout << "cancelled: " << Name(stream->Finish().error_code()) << "\n";
}

void Fail(v1::Inference::Stub& stub) {
  grpc::ClientContext context;
  auto stream = stub.Chat(&context, Ask("Hello!", 9, 16));
  v1::ChatResponse response;
  while (stream->Read(&response)) {
  }
  std::cout << "error: " << Name(stream->Finish().error_code()) << "\n";
  // status.error_details() is a google.rpc.Status; the field is in a trailer of its own too.
  auto field = context.GetServerTrailingMetadata().find("shoal-error-param");
  std::cout << "field: " << std::string(field->second.data(), field->second.size()) << "\n";
}

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: chat HOST:PORT\n";
    return 2;
  }
  auto channel = grpc::CreateChannel(argv[1], grpc::InsecureChannelCredentials());
  auto stub = v1::Inference::NewStub(channel);
  ListModels(*stub);
  Chat(*stub);
  Cancel(*stub);
  Fail(*stub);
}
