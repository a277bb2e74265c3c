// The Vercel AI SDK with its provider for OpenAI-compatible servers.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(`${process.env.CLIENTS_NODE}/package.json`);
const load = (name) => import(pathToFileURL(require.resolve(name)).href);
const { generateObject, generateText, streamText, tool, APICallError } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { z } = await load("zod");

const [url, name] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "shoal", baseURL: url, apiKey: "none", supportsStructuredOutputs: true,
});
const model = provider(name);
const passed = (step) => console.log(`ok ${step}`);
const City = z.object({ city: z.string().max(20), people: z.number().int().min(0).max(99) });
const short = { model, prompt: "Say hello.", maxOutputTokens: 8, temperature: 0, maxRetries: 0 };

for (const dependency of ["ai", "@ai-sdk/openai-compatible"]) {
  console.log(`version ${dependency} ${require(`${dependency}/package.json`).version}`);
}
const answer = await generateText(short);
assert(answer.text);
passed("chat");

let text = "";
for await (const piece of streamText(short).textStream) text += piece;
assert.equal(text, answer.text);
passed("streaming");

const made = await generateObject({ ...short, maxOutputTokens: 80, schema: City });
assert.equal(typeof made.object.city, "string");
passed("schema");

const called = await generateText({
  ...short,
  maxOutputTokens: 80,
  tools: { count: tool({ description: "Counts.", inputSchema: City }) },
  toolChoice: "required",
});
assert.equal(called.toolCalls[0].toolName, "count");
passed("tool call");

const controller = new AbortController();
const long = streamText({
  ...short, maxOutputTokens: 2000, abortSignal: controller.signal, onError: () => {},
});
for await (const _ of long.textStream) {
  controller.abort();
  break;
}
passed("cancel");

await assert.rejects(
  generateText({ ...short, temperature: 9 }),
  (error) => APICallError.isInstance(error) && error.statusCode === 400,
);
passed("error");
