// The gateway's API: fetch with the key, errors in words, and streams of events.

const KEY = "shoal.key"; // in sessionStorage: gone with the tab

let askForKey = () => Promise.resolve(null); // set by the page: shows the dialog

export function onKeyNeeded(ask) {
  askForKey = ask;
}

export function apiKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function setApiKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** What a person is told: the server's own sentence where there is one. */
export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** A fetch that asks for a key when the gateway wants one, and tries again with it. */
export async function call(path, options = {}) {
  for (;;) {
    const key = apiKey();
    const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
    let response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The gateway cannot be reached.", 0);
    }
    if (response.ok) return response;
    const error = await errorOf(response);
    if (response.status !== 401 || (await askForKey(key)) === null) throw error;
  }
}

async function errorOf(response) {
  try {
    const { error } = await response.json();
    return new ApiError(error.message, response.status, error.code ?? error.type);
  } catch {
    return new ApiError(`The gateway answered ${response.status}.`, response.status);
  }
}

export async function getJson(path, options) {
  return (await call(path, options)).json();
}

/** The events of a response, as { event, data }, as they come. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      const blocks = rest.split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        let event = "message";
        const data = [];
        for (const line of block.split("\n")) {
          if (line.startsWith("event: ")) event = line.slice(7);
          else if (line.startsWith("data: ")) data.push(line.slice(6));
        }
        if (data.length) yield { event, data: data.join("\n") };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** A name for a request; `crypto.randomUUID` is not there on plain HTTP. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
