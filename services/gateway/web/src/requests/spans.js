// A journey's events as spans of a waterfall. Pure.

const LEAST = 5e-5; // seconds in a queue that are worth a row

/**
 * Rows of { name, kind, start, end, choice, note, ticks } in order of their start. `end` is
 * null for what goes on still. A choice that was moved has the spans of each worker it was on.
 */
export function spansOf({ request, events, now }) {
  const end = request.ended ?? now;
  const rows = [];
  const gateway = new Map(events.filter(({ choice = 0 }) => choice === 0).map((event) => [event.kind, event]));
  const received = events[0].at;
  const encoded = gateway.get("encoded");
  const stop = events.find(({ kind }) => kind === "ended")?.at ?? null;
  add(rows, "Encode", "encode", received, encoded?.at ?? stop, { note: encoded && `${encoded.tokens} tokens` });
  const queued = gateway.get("queued");
  if (queued) add(rows, "Queue in the gateway", "queue", queued.at, gateway.get("admitted")?.at ?? stop);
  for (let choice = 0; choice < request.choices; choice += 1) {
    const mine = events.filter((event) => (event.choice ?? 0) === choice);
    choiceSpans(rows, mine, choice, stop);
  }
  rows.sort((a, b) => a.start - b.start);
  const shown = rows.filter(({ kind, start, end: until }) => kind !== "queue" || until === null || until - start > LEAST);
  return { rows: shown, start: received, end: Math.max(end, received + 1e-4) };
}

function add(rows, name, kind, start, end, more = {}) {
  rows.push({ name, kind, start, end, ticks: [], ...more });
}

function choiceSpans(rows, events, choice, stop) {
  let phase = null; // the span that is open
  const close = (at) => {
    if (phase) phase.end = at;
    phase = null;
  };
  const open = (name, kind, at, note) => {
    close(at);
    phase = { name, kind, start: at, end: stop, choice, note, ticks: [] };
    rows.push(phase);
  };
  let worker = "";
  let firstToken = null;
  for (const event of events) {
    switch (event.kind) {
      case "submitted":
        worker = event.address;
        open("Send to the worker", "submit", event.at, worker);
        break;
      case "accepted":
        open("Queue at the worker", "queue", event.at, worker);
        break;
      case "started":
        open("Prefill", "prefill", event.at, event.tokens ? `${event.tokens} tokens cached` : worker);
        break;
      case "prefilled":
        phase?.ticks.push({ at: event.at, label: `${event.tokens} tokens done` });
        break;
      case "first_token":
        firstToken ??= event.at;
        if (phase?.ticks.length) phase.note = `in ${phase.ticks.length + 1} parts`;
        open("Decode", "decode", event.at, worker);
        break;
      case "first_text":
        if (firstToken !== null) rows.push({ name: "First text", kind: "detokenize", start: firstToken, end: event.at, choice, ticks: [] });
        break;
      case "worker_lost":
      case "worker_left":
      case "refused":
        open("Move to another worker", "resume", event.at, event.detail);
        break;
      case "decoder_lost":
      case "decoder_left":
        rows.push({ name: "Move to another detokenizer", kind: "resume", start: event.at, end: event.at, choice, note: event.detail, ticks: [] });
        break;
      case "last_token":
        if (phase) phase.note = `${event.tokens} tokens`;
        close(event.at);
        phase = { name: "Last text", kind: "detokenize", start: event.at, end: stop, choice, ticks: [] };
        rows.push(phase);
        break;
      case "last_text":
      case "ended":
        close(event.at);
        break;
    }
  }
}
