// The official OpenAI package for Node.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(`${process.env.CLIENTS_NODE}/package.json`);
const load = (name) => import(pathToFileURL(require.resolve(name)).href);
const { default: OpenAI } = await load("openai");
const { zodResponseFormat } = await load("openai/helpers/zod");
const { z } = await load("zod");

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0, timeout: 600_000 });
const messages = [{ role: "user", content: "Say hello." }];
const passed = (step) => console.log(`ok ${step}`);
const City = z.object({ city: z.string().max(20), people: z.number().int().min(0).max(99) });
const tool = {
  type: "function",
  function: {
    name: "count",
    parameters: {
      type: "object",
      properties: { city: { type: "string", maxLength: 20 }, people: { type: "integer", minimum: 0, maximum: 99 } },
      required: ["city", "people"],
    },
  },
};

const manifest = `${process.env.CLIENTS_NODE}/node_modules/openai/package.json`;
console.log(`version openai ${JSON.parse(readFileSync(manifest)).version}`);
const ids = [];
for await (const card of client.models.list()) ids.push(card.id);
assert(ids.includes(model));
passed("models");

const answer = await client.chat.completions.create({
  model, messages, max_tokens: 8, n: 2, logprobs: true, top_logprobs: 2, seed: 1,
});
assert.equal(answer.choices.length, 2);
assert(answer.choices[0].logprobs.content.length > 0);
passed("chat, n, logprobs");

const options = { model, messages, max_tokens: 8, temperature: 0 };
const whole = await client.chat.completions.create(options);
let text = "";
for await (const chunk of await client.chat.completions.create({ ...options, stream: true })) {
  text += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(text, whole.choices[0].message.content);
passed("streaming");

const completion = await client.completions.create({
  model, prompt: ["One, two,", "A, b,"], max_tokens: 4, echo: true,
});
assert(completion.choices[0].text.startsWith("One, two,"));
passed("completions");

const called = await client.chat.completions.create({
  model, messages, tools: [tool], tool_choice: "required", parallel_tool_calls: false,
  max_tokens: 200, temperature: 0,
});
const [call] = called.choices[0].message.tool_calls;
assert.equal(call.function.name, "count");
assert("city" in JSON.parse(call.function.arguments));
passed("tools");

const parsed = await client.chat.completions.parse({
  model, messages, max_tokens: 200, temperature: 0, response_format: zodResponseFormat(City, "city"),
});
assert.equal(typeof parsed.choices[0].message.parsed.city, "string");
passed("structured output with parse");

const response = await client.responses.create({
  model, input: "Say hello.", max_output_tokens: 8,
});
assert(response.output_text);
const types = [];
for await (const event of await client.responses.create({
  model, input: "Say hello.", max_output_tokens: 8, stream: true,
})) {
  types.push(event.type);
}
assert.equal(types[0], "response.created");
passed("responses");

const long = await client.chat.completions.create({
  model, messages, max_tokens: 2000, stream: true, ignore_eos: true,
});
for await (const _ of long) break; // which aborts the request
passed("cancel");

await assert.rejects(
  client.chat.completions.create({ model, messages, temperature: 9 }),
  (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature",
);
await assert.rejects(
  client.chat.completions.create({ model: "nope", messages }),
  (error) => error instanceof OpenAI.NotFoundError,
);
passed("errors");
