// The last requests of this gateway, and the journey of one.
import { useEffect, useState } from "preact/hooks";
import { getJson } from "../api.js";
import { clock, count, phaseName, seconds, shortAddress } from "../format.js";
import { Icon } from "../icons.jsx";
import { Waterfall } from "./waterfall.jsx";

const EVERY_MS = 1000;

/** An answer of the gateway, asked for again every second until `done` says so. */
function usePolled(path, done = () => false) {
  const [state, setState] = useState({});
  useEffect(() => {
    const abort = new AbortController();
    let timer = 0;
    const ask = async () => {
      let finished = false;
      try {
        const value = await getJson(path, { signal: abort.signal });
        setState({ value });
        finished = done(value);
      } catch (error) {
        if (abort.signal.aborted) return;
        setState((before) => ({ ...before, error }));
        finished = error.status === 404 || error.status === 401;
      }
      if (!finished) timer = setTimeout(ask, EVERY_MS);
    };
    ask();
    return () => {
      abort.abort();
      clearTimeout(timer);
    };
  }, [path]);
  return state;
}

export function Requests() {
  const [filter, setFilter] = useState("all");
  const { value, error } = usePolled("/fleet/requests?limit=200");
  const all = value?.requests ?? [];
  const shown = all.filter((request) => FILTERS[filter](request));
  return (
    <div class="page">
      <div class="headline">
        <h1>Requests</h1>
        <p class="muted">The last of this gateway, newest first. No text is kept.</p>
        <div class="switch" role="group" aria-label="Which requests">
          {Object.keys(FILTERS).map((name) => (
            <button key={name} type="button" aria-pressed={name === filter} onClick={() => setFilter(name)}>{name}</button>
          ))}
        </div>
      </div>
      {error && <p class="failure" role="alert">{error.message}</p>}
      {value && !shown.length && <p class="card empty muted">Nothing yet. Ask something under <a href="#/chat">Chat</a>.</p>}
      {shown.length > 0 && <List requests={shown} value={value} />}
    </div>
  );
}

const FILTERS = {
  all: () => true,
  running: ({ ended }) => ended === null,
  failed: ({ ended, outcome }) => ended !== null && !["stop", "length", "cancelled"].includes(outcome),
  resumed: ({ resumes }) => resumes > 0,
};

function List({ requests, value }) {
  return (
    <section class="card">
      <table class="instances requests">
        <thead>
          <tr><th scope="col">Request</th><th scope="col">Outcome</th><th scope="col">Worker</th>
            <th scope="col" class="number">Prompt</th><th scope="col" class="number">Output</th>
            <th scope="col" class="number">TTFT</th><th scope="col" class="number">Took</th></tr>
        </thead>
        <tbody>
          {requests.map((request) => (
            <tr key={request.id}>
              <th scope="row">
                <a href={`#/requests/${request.id}`}>{request.kind} {request.request_id.slice(0, 12)}</a>
                <small class="muted">{clock(value.time - (value.now - request.received))}{request.tenant && `, ${request.tenant}`}, {request.model}</small>
              </th>
              <td data-label="Outcome"><Outcome request={request} /></td>
              <td data-label="Worker" title={request.worker}>{shortAddress(request.worker) || "–"}</td>
              <td class="number" data-label="Prompt">{count(request.prompt_tokens)}
                {request.cached_tokens > 0 && <small class="muted">{count(request.cached_tokens)} cached</small>}</td>
              <td class="number" data-label="Output">{count(request.output_tokens)}</td>
              <td class="number" data-label="TTFT">{seconds(request.ttft)}</td>
              <td class="number" data-label="Took">{seconds((request.ended ?? value.now) - request.received)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}

function Outcome({ request }) {
  const running = request.ended === null;
  const mood = running ? "running" : { stop: "ready", length: "ready", cancelled: "draining" }[request.outcome] ?? "dead";
  return (
    <>
      <span class={`state ${mood}`}><i class={`dot ${mood}`} />{running ? phaseName(request.phase) : request.outcome.replaceAll("_", " ")}</span>
      {request.resumes > 0 && <small class="muted">resumed {request.resumes === 1 ? "once" : `${request.resumes} times`}</small>}
    </>
  );
}

/** One request, by the gateway's name for it, or with id "named" by the client's. */
export function Journey({ id, name }) {
  return id === "named" ? <Named requestId={name} /> : <OneJourney id={id} />;
}

function Named({ requestId }) {
  const { value, error } = usePolled(`/fleet/requests?limit=1&request_id=${encodeURIComponent(requestId)}`, () => true);
  if (value?.requests.length) return <OneJourney id={value.requests[0].id} />;
  return (
    <div class="page">
      <Back />
      <p class="card empty" role="status">
        {value ? "This gateway does not keep that request: it is too old, or another gateway served it." : (error?.message ?? "Looking for it.")}
      </p>
    </div>
  );
}

function Back() {
  return <a class="back" href="#/requests"><Icon name="back" /> All requests</a>;
}

function OneJourney({ id }) {
  const { value, error } = usePolled(`/fleet/requests/${encodeURIComponent(id)}`, ({ request }) => request.ended !== null);
  if (!value) {
    return <div class="page"><Back /><p class="card empty" role="status">{error?.message ?? "Loading."}</p></div>;
  }
  const { request } = value;
  const took = (request.ended ?? value.now) - request.received;
  const decode = request.ttft === null ? null : took - request.ttft;
  return (
    <div class="page">
      <Back />
      <div class="headline">
        <h1>Request <span class="mono">{request.request_id.slice(0, 16)}</span></h1>
        <p><Outcome request={request} /></p>
      </div>
      <dl class="tiles">
        <Fact name="Took" value={seconds(took)} more={clock(value.time - (value.now - request.received))} />
        <Fact name="TTFT" value={seconds(request.ttft)} more="from arrival to the first text" />
        <Fact name="Prompt" value={count(request.prompt_tokens)} more={`${count(request.cached_tokens)} from the cache`} />
        <Fact name="Output" value={count(request.output_tokens)}
          more={decode > 0 && request.output_tokens > 1 ? `${count((request.output_tokens - 1) / decode)} tokens/s` : "tokens"} />
        <Fact name="Model" value={request.model || "–"} more={`${request.kind}, ${request.choices} ${request.choices === 1 ? "choice" : "choices"}`} small />
      </dl>
      <Waterfall journey={value} />
    </div>
  );
}

function Fact({ name, value, more, small }) {
  return (
    <div class="tile">
      <dt>{name}</dt>
      <dd class={small ? "value small" : "value"}>{value}</dd>
      <dd class="muted">{more}</dd>
    </div>
  );
}
