// A Node client: node examples/grpc/node/chat.js 127.0.0.1:8001
// Needs: npm install @grpc/grpc-js @grpc/proto-loader
"use strict";

const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

const root = path.join(__dirname, "../../..");
const definition = protoLoader.loadSync("protos/inference.proto", {
  includeDirs: [root],
  keepCase: true,
  enums: String,
  longs: Number,
  defaults: true,
  oneofs: true,
});
const { Inference } = grpc.loadPackageDefinition(definition).shoal.v1;

function ask(text, sampling) {
  return { chat: { messages: [{ role: "user", content: text }] }, options: { sampling } };
}

async function main(address) {
  const client = new Inference(address, grpc.credentials.createInsecure());

  const models = await new Promise((resolve, reject) =>
    client.ListModels({}, (error, answer) => (error ? reject(error) : resolve(answer))),
  );
  for (const model of models.models) console.log("model:", model.id, model.max_model_len);

  // A stream, with a deadline of a minute for the whole answer.
  process.stdout.write("chat: ");
  const request = ask("Hello!", { temperature: 0, max_tokens: 16 });
  for await (const answer of client.Chat(request, { deadline: Date.now() + 60_000 })) {
    for (const piece of answer.pieces) {
      process.stdout.write(piece.text);
      if (piece.finish_reason !== "FINISH_REASON_UNSPECIFIED") {
        console.log("\nfinish:", piece.finish_reason);
      }
    }
    if (answer.usage) {
      console.log("usage:", answer.usage.prompt_tokens, answer.usage.completion_tokens);
    }
  }

  // To cancel, cancel the call: the work stops at the worker.
  const call = client.Chat(ask("Count for ever.", { max_tokens: 4000 }));
  call.once("data", () => call.cancel());
  const end = await new Promise((resolve) => call.once("error", resolve));
  console.log("cancelled:", grpc.status[end.code]);

  // An error has a status, a sentence, and what was at fault in trailers.
  try {
    for await (const _ of client.Chat(ask("Hello!", { temperature: 9 }))) {
    }
  } catch (error) {
    console.log("error:", grpc.status[error.code]);
    console.log("field:", error.metadata.get("shoal-error-param")[0]);
  }
  client.close();
}

main(process.argv[2]);
