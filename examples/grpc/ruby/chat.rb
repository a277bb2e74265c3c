# A Ruby client: ruby -I GENERATED examples/grpc/ruby/chat.rb 127.0.0.1:8001
# Needs: apt-get install ruby-grpc protobuf-compiler-grpc, and the generated code:
#   protoc -I. --ruby_out=GENERATED --grpc_out=GENERATED \
#     --plugin=protoc-gen-grpc=$(command -v grpc_ruby_plugin) \
#     protos/common.proto protos/inference.proto
require "grpc"
require "protos/inference_services_pb"

V1 = Shoal::V1

def ask(text, **sampling)
  V1::ChatRequest.new(
    chat: V1::ChatPrompt.new(messages: [V1::ChatMessage.new(role: "user", content: text)]),
    options: V1::GenerationOptions.new(sampling: V1::SamplingParams.new(**sampling))
  )
end

stub = V1::Inference::Stub.new(ARGV.fetch(0), :this_channel_is_insecure)

stub.list_models(V1::ListModelsRequest.new).models.each do |model|
  puts "model: #{model.id} #{model.max_model_len}"
end

# A stream, with a deadline of a minute for the whole answer.
print "chat: "
request = ask("Hello!", temperature: 0, max_tokens: 16)
stub.chat(request, deadline: Time.now + 60).each do |answer|
  answer.pieces.each do |piece|
    print piece.text
    unless piece.finish_reason == :FINISH_REASON_UNSPECIFIED
      puts "\nfinish: #{piece.finish_reason}"
    end
  end
  puts "usage: #{answer.usage.prompt_tokens} #{answer.usage.completion_tokens}" if answer.usage
end

# To cancel, cancel the call's operation: the work stops at the worker.
operation = stub.chat(ask("Count for ever.", max_tokens: 4000), return_op: true)
begin
  operation.execute.each { operation.cancel }
rescue GRPC::Cancelled
  puts "cancelled: CANCELLED"
end

# An error has a status, a sentence, and details; the field is in a trailer of its own too.
begin
  stub.chat(ask("Hello!", temperature: 9)).to_a
rescue GRPC::InvalidArgument => error
  puts "error: INVALID_ARGUMENT"
  puts "field: #{error.metadata["shoal-error-param"]}"
end
