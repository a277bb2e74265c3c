// The OpenAI package for Node at a server that serves one request at a time.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(`${process.env.CLIENTS_NODE}/package.json`);
const { default: OpenAI } = await import(pathToFileURL(require.resolve("openai")).href);

const [url, model] = process.argv.slice(2);
const patient = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 30 });
const ask = (client, number) =>
  client.completions.create({ model, prompt: `request ${number}`, max_tokens: 10 });

const answers = await Promise.all([...Array(6).keys()].map((number) => ask(patient, number)));
assert(answers.every((answer) => answer.usage.completion_tokens === 10));
console.log("ok retries");

const hasty = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const outcomes = await Promise.allSettled([...Array(8).keys()].map((number) => ask(hasty, number)));
const refused = outcomes.filter((outcome) => outcome.status === "rejected");
assert(refused.length > 0 && refused.length < 8);
assert(refused.every((outcome) => outcome.reason instanceof OpenAI.RateLimitError));
console.log("ok refusals");
