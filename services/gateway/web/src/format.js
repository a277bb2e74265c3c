// Numbers as a person reads them.

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  return span(value);
}

/** A long time, in its two largest units. */
export function span(value) {
  const whole = Math.max(0, Math.round(value));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

export function count(value) {
  if (value === null || value === undefined) return "–";
  return Math.round(value).toLocaleString("en");
}

export function rate(value) {
  if (value === null || value === undefined) return "–";
  return value < 10 && value > 0 ? value.toFixed(1) : count(value);
}

export function percent(value) {
  return value === null || value === undefined ? "–" : `${Math.round(value * 100)} %`;
}

/** An instance's address without what all of them share. */
export function shortAddress(address) {
  return address.startsWith("unix:") ? address.split("/").pop().replace(/\.sock$/, "") : address;
}

const PHASES = {
  received: "encoding",
  encoded: "placing",
  queued: "queued",
  admitted: "placing",
  submitted: "submitted",
  accepted: "waiting",
  started: "prefilling",
  prefilled: "prefilling",
  first_token: "decoding",
  first_text: "decoding",
  last_token: "finishing",
  last_text: "finishing",
};

/** What a request is doing whose newest event is of that kind. */
export function phaseName(kind) {
  return PHASES[kind] ?? "moving";
}

export function clock(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleTimeString("en-GB");
}
