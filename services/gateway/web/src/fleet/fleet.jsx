// The fleet, live: figures of the gateway, charts, the engines' timeline, every instance.
import { useEffect, useRef } from "preact/hooks";
import { count, percent, rate, seconds, shortAddress, span } from "../format.js";
import { fleet, status, watch } from "../live.js";
import { useStore } from "../store.js";
import { Charts } from "./charts.jsx";
import { Timeline } from "./timeline.jsx";

const GONE_SECONDS = 60; // an instance that was taken off the list is shown that long
const STATES = {
  ready: "ready",
  starting: "starting",
  draining: "draining",
  "breaker-open": "breaker open",
  dead: "dead",
  gone: "gone",
};

export function Fleet() {
  const snapshot = useStore(fleet);
  const link = useStore(status);
  useEffect(watch, []);
  const instances = useWithGone(snapshot);
  if (!snapshot) {
    return (
      <div class="page">
        <h1>Fleet</h1>
        <p class="muted" role="status">
          {link === "lost" ? "The gateway cannot be reached. Trying again." : "Connecting to the gateway."}
        </p>
      </div>
    );
  }
  const shown = { all: instances, now: snapshot.now, localDecoder: snapshot.gateway.local_decoder };
  return (
    <div class="page">
      <Headline snapshot={snapshot} link={link} instances={instances} />
      <Tiles gateway={snapshot.gateway} instances={instances} />
      <Charts />
      <Timeline workers={instances.filter(({ service }) => service === "worker")} />
      <Group title="Workers" service="worker" {...shown} />
      <div class="pair">
        <Group title="Tokenizers" service="tokenizer" {...shown} />
        <Group title="Detokenizers" service="detokenizer" {...shown} />
      </div>
    </div>
  );
}

/** The instances, and for a while those that have left the list. */
function useWithGone(snapshot) {
  const seen = useRef(new Map());
  if (!snapshot) return [];
  const key = ({ service, address }) => `${service} ${address}`;
  const listed = new Set(snapshot.instances.map(key));
  for (const instance of snapshot.instances) seen.current.set(key(instance), { instance });
  for (const [name, entry] of seen.current) {
    if (listed.has(name)) continue;
    entry.gone ??= snapshot.now;
    if (snapshot.now - entry.gone > GONE_SECONDS) seen.current.delete(name);
  }
  return [...seen.current.values()].map(({ instance, gone }) =>
    gone === undefined
      ? instance
      : { ...instance, state: "gone", since: gone, detail: "its address is no longer listed", heard: null },
  );
}

function Headline({ snapshot, link, instances }) {
  const { gateway } = snapshot;
  const down = instances.filter(({ state }) => state === "dead" || state === "gone").length;
  const other = instances.filter(({ state }) => !["ready", "dead", "gone"].includes(state)).length;
  let verdict = "Serving";
  let mood = "ready";
  if (gateway.draining) [verdict, mood] = ["Draining", "draining"];
  else if (!gateway.ready) [verdict, mood] = [`Not serving: ${gateway.reasons.join(", ")}`, "dead"];
  else if (down) [verdict, mood] = [`Serving; ${down} ${down === 1 ? "instance is" : "instances are"} down`, "breaker-open"];
  else if (other) [verdict, mood] = [`Serving; ${other} not ready`, "draining"];
  return (
    <div class="headline">
      <h1>Fleet</h1>
      <p class={`verdict ${mood}`} role="status">
        <i class={`dot ${mood}`} /> {verdict}
      </p>
      <p class="muted link">
        {link === "live" ? `live from ${gateway.id}, up ${span(snapshot.now - gateway.started)}` : "connection lost; trying again"}
      </p>
    </div>
  );
}

function Tiles({ gateway, instances }) {
  const { minute } = gateway;
  const engines = instances.filter(({ engine, state }) => engine && state !== "gone");
  const sum = (name) => engines.reduce((total, { engine }) => total + engine[name], 0);
  return (
    <dl class="tiles">
      <Tile name="Running" value={count(sum("running"))} more={`${count(sum("waiting"))} wait at workers`} />
      <Tile name="In this gateway" value={count(gateway.streams)} more={`${count(gateway.queued)} queued here`} />
      <Tile name="Tokens/s out" value={rate(sum("tokens_out_per_s"))} more={`${rate(sum("tokens_in_per_s"))} prefilled`} />
      <Tile name="TTFT" value={seconds(minute.ttft.p50)} more={`p99 ${seconds(minute.ttft.p99)}`} />
      <Tile name="Inter-chunk" value={seconds(minute.itl.p50)} more={`p99 ${seconds(minute.itl.p99)}`} />
      <Tile name="Last minute" value={count(minute.requests)} unit="requests"
        more={`${count(minute.errors)} failed, ${count(minute.resumes)} resumed`} bad={minute.errors > 0} />
    </dl>
  );
}

function Tile({ name, value, unit, more, bad }) {
  return (
    <div class="tile">
      <dt>{name}</dt>
      <dd class="value">{value}{unit && <small> {unit}</small>}</dd>
      <dd class={bad ? "bad" : "muted"}>{more}</dd>
    </div>
  );
}

function Group({ title, service, all, now, localDecoder }) {
  const instances = all.filter((instance) => instance.service === service);
  if (!instances.length) {
    const none = service === "detokenizer" && localDecoder;
    return none ? <p class="card muted">This gateway decodes by itself: there are no detokenizers.</p> : null;
  }
  const ready = instances.filter(({ state }) => state === "ready").length;
  const isWorker = service === "worker";
  return (
    <section class="card" aria-labelledby={`${service}-title`}>
      <h2 id={`${service}-title`}>{title} <small class="muted">{ready} of {instances.length} ready</small></h2>
      <table class={`instances ${service}`}>
        <thead>
          <tr>
            <th scope="col">Instance</th>
            <th scope="col">State</th>
            {isWorker && <><th scope="col">Requests</th><th scope="col">KV pages</th>
              <th scope="col" class="number">Prefix hits</th>
              <th scope="col" class="number">Tokens/s</th><th scope="col" class="number">Step</th></>}
            {!isWorker && <th scope="col" class="number">Open here</th>}
            <th scope="col" class="number">Heard</th>
          </tr>
        </thead>
        <tbody>
          {instances.map((instance) => <Row key={instance.address} instance={instance} now={now} />)}
        </tbody>
      </table>
    </section>
  );
}

function Row({ instance, now }) {
  const { state, engine } = instance;
  const away = state === "dead" || state === "gone" || state === "starting";
  return (
    <tr class={state} data-address={instance.address} data-state={state}>
      <th scope="row" title={instance.address}>
        <span class="name">{shortAddress(instance.address)}</span>
        <small class="muted">{instance.model || "unknown model"}{instance.version && `, ${instance.version}`}
          {engine?.tensor_parallel > 1 && `, tp ${engine.tensor_parallel}`}</small>
      </th>
      <td data-label="State">
        <span class={`state ${state}`}><i class={`dot ${state}`} />{STATES[state]}</span>
        <small class="muted" title={instance.detail}>{span(now - instance.since)}{instance.detail && `, ${instance.detail}`}</small>
      </td>
      {instance.service === "worker" && <EngineCells engine={away ? null : engine} />}
      {instance.service !== "worker" && <td class="number" data-label="Open here">{count(instance.outstanding)}</td>}
      <td class="number" data-label="Heard">{instance.heard === null ? "–" : `${Math.max(0, now - instance.heard).toFixed(1)} s ago`}</td>
    </tr>
  );
}

function EngineCells({ engine }) {
  if (!engine) {
    return ["Requests", "KV pages", "Prefix hits", "Tokens/s", "Step"].map((label, i) => (
      <td key={label} data-label={label} class={i > 1 ? "number muted" : "muted"}>–</td>
    ));
  }
  const held = Math.max(0, engine.pages - engine.pages_free - engine.pages_evictable);
  return (
    <>
      <td data-label="Requests">
        <Bar parts={[["used", engine.running / (engine.max_running || 1)]]}
          label={`${engine.running} of ${engine.max_running} running, ${engine.waiting} waiting`} />
        <small>{count(engine.running)}<span class="muted"> / {count(engine.max_running)}</span>
          {engine.waiting > 0 && <b class="waiting-count"> +{count(engine.waiting)} waiting</b>}</small>
      </td>
      <td data-label="KV pages">
        <Bar parts={[["used", held / engine.pages], ["cached", engine.pages_evictable / engine.pages]]}
          label={`${count(engine.pages)} pages: ${count(held)} held, ${count(engine.pages_evictable)} cached, ${count(engine.pages_free)} free`} />
        <small>{percent(held / engine.pages)}<span class="muted"> held, {percent(engine.pages_evictable / engine.pages)} cached</span></small>
      </td>
      <td class="number" data-label="Prefix hits">{percent(engine.prefix_hit_rate)}</td>
      <td class="number" data-label="Tokens/s">{rate(engine.tokens_out_per_s)}
        <small class="muted">{rate(engine.tokens_in_per_s)} in</small></td>
      <td class="number" data-label="Step">{engine.step_s ? seconds(engine.step_s) : "–"}
        <small class="muted" title={`${percent(engine.bubble)} bubble: idle with requests there`}>{percent(engine.busy)} busy</small></td>
    </>
  );
}

function Bar({ parts, label }) {
  return (
    <span class="meter" role="img" aria-label={label} title={label}>
      {parts.map(([name, share]) => (
        <i key={name} class={name} style={{ width: `${Math.min(100, share * 100).toFixed(1)}%` }} />
      ))}
    </span>
  );
}
