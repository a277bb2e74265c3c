// One answer: asks /v1/chat/completions, and tells of what comes.
import { ApiError, call, events, newId } from "../api.js";

const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed",
  "presence_penalty", "frequency_penalty", "repetition_penalty",
];

function body(messages, settings) {
  const asked = messages.map(({ role, content }) => ({ role, content }));
  if (settings.system.trim()) asked.unshift({ role: "system", content: settings.system });
  const result = { messages: asked, stream: true, stream_options: { include_usage: true } };
  if (settings.model) result.model = settings.model;
  for (const name of NUMBERS) {
    if (settings[name] !== "" && settings[name] !== null) result[name] = Number(settings[name]);
  }
  const stops = settings.stop.split("\n").filter(Boolean);
  if (stops.length) result.stop = stops.map((stop) => stop.replaceAll("\\n", "\n"));
  if (settings.tokens) Object.assign(result, { logprobs: true, top_logprobs: 5 });
  return result;
}

/**
 * Streams an answer into `message`, calling `onChange` after each piece; returns when it has
 * ended. `message` gets content, reasoning, tokens, stats and, where it failed, error.
 */
export async function answer(messages, settings, message, onChange, signal) {
  const began = performance.now();
  message.requestId = newId();
  const stats = (message.stats = {});
  let last = began;
  try {
    const response = await call("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json", "x-request-id": message.requestId },
      body: JSON.stringify(body(messages, settings)),
      signal,
    });
    for await (const { data } of events(response)) {
      if (data === "[DONE]") break;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message, 0, event.error.code);
      if (event.usage) stats.usage = event.usage;
      message.model = event.model ?? message.model;
      const choice = event.choices?.[0];
      if (!choice) continue;
      if (choice.delta?.content || choice.delta?.reasoning_content) {
        last = performance.now();
        stats.ttft ??= (last - began) / 1000;
      }
      message.content += choice.delta?.content ?? "";
      message.reasoning = (message.reasoning ?? "") + (choice.delta?.reasoning_content ?? "");
      if (choice.logprobs?.content) (message.tokens ??= []).push(...choice.logprobs.content);
      if (choice.finish_reason) stats.finish = choice.finish_reason;
      onChange();
    }
  } catch (error) {
    if (error.name === "AbortError" || signal.aborted) stats.finish = "stopped";
    else message.error = error.message;
  }
  stats.seconds = (last - began) / 1000;
  const decoding = stats.seconds - (stats.ttft ?? 0);
  const made = stats.usage?.completion_tokens ?? message.tokens?.length;
  if (made > 2 && decoding > 0) stats.rate = (made - 1) / decoding;
  onChange();
}
