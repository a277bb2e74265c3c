// The live view of the fleet: one stream of events, shared by whoever shows it.
// While nobody does there is no stream, and the gateway asks its workers for nothing.
import { call, events, getJson } from "./api.js";
import { Store } from "./store.js";

const KEPT_SECONDS = 60; // of steps
const HISTORY_SECONDS = 180;
const RETRY_MS = 1000;
const NO_KEY_MS = 60_000;

export const fleet = new Store(null); // the newest snapshot
export const status = new Store("connecting"); // connecting, live, lost
export const steps = new Map(); // a worker's address -> its steps, oldest first
export const history = new Store([]); // rows for the charts, one a second

let watchers = 0;
let abort = null;
let offset = null; // this page's clock less the gateway's, in seconds

/** Now, on the gateway's clock. */
export function gatewayNow() {
  return offset === null ? 0 : performance.now() / 1000 - offset;
}

/** Keeps the stream open until the returned function is called. */
export function watch() {
  watchers += 1;
  if (watchers === 1) {
    abort = new AbortController();
    follow(abort.signal);
  }
  return () => {
    watchers -= 1;
    if (!watchers) abort.abort();
  };
}

async function follow(signal) {
  while (!signal.aborted) {
    let pause = RETRY_MS;
    try {
      const past = await getJson("/fleet/history", { signal });
      history.set(rowsOf(past));
      const response = await call("/fleet/events", { signal });
      for await (const { event, data } of events(response)) {
        if (event === "fleet") onSnapshot(JSON.parse(data));
        else if (event === "steps") onSteps(JSON.parse(data));
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401) pause = NO_KEY_MS; // the dialog was just dismissed
    }
    status.set("lost");
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

function onSnapshot(snapshot) {
  const seen = performance.now() / 1000 - snapshot.now;
  // The least delay is nearest to the truth; another gateway has another clock.
  offset = offset === null || Math.abs(seen - offset) > 5 ? seen : Math.min(offset + 0.001, seen);
  addRow(snapshot);
  fleet.set(snapshot);
  status.set("live");
}

function onSteps({ address, steps: told }) {
  const kept = steps.get(address) ?? [];
  for (const [number, began, duration, bubble, prefill, decode] of told) {
    kept.push({ number, began, duration, bubble, prefill, decode });
  }
  const oldest = gatewayNow() - KEPT_SECONDS;
  let first = 0;
  while (first < kept.length && kept[first].began < oldest) first += 1;
  steps.set(address, first ? kept.slice(first) : kept);
}

function rowsOf(past) {
  return past.start.map((start, i) => ({
    at: start,
    ttft50: past.ttft_p50[i],
    ttft99: past.ttft_p99[i],
    itl50: past.itl_p50[i],
    itl99: past.itl_p99[i],
    tokensIn: past.tokens_in[i],
    tokensOut: past.tokens_out[i],
  }));
}

let refreshed = 0;

/** Charts show whole seconds, which the gateway counts: asked for again every two. */
async function addRow(snapshot) {
  if (snapshot.now - refreshed < 2 && snapshot.now >= refreshed) return;
  refreshed = snapshot.now;
  try {
    history.set(rowsOf(await getJson("/fleet/history")).slice(-HISTORY_SECONDS));
  } catch {
    // the stream's own loss is told; the charts go on with the next answer
  }
}
