// One request's journey as a waterfall: what it waited for, where, and for how long.
import { seconds, shortAddress } from "../format.js";
import { spansOf } from "./spans.js";

export function Waterfall({ journey }) {
  const { rows, start, end } = spansOf(journey);
  const share = (time) => `${(((time - start) / (end - start)) * 100).toFixed(3)}%`;
  const several = journey.request.choices > 1;
  return (
    <>
      <section class="card" aria-labelledby="journey-title">
        <h2 id="journey-title">Journey</h2>
        <ol class="waterfall">
          {rows.map((row, i) => {
            const until = row.end ?? end;
            const note = row.note && shortAddress(row.note);
            return (
              <li key={i}>
                <span class="what">{row.name}{several && row.choice !== undefined && <small class="muted"> choice {row.choice}</small>}
                  {note && <small class="muted" title={row.note}>{note}</small>}</span>
                <span class="track" aria-hidden="true">
                  <i class={`span ${row.kind} ${row.end === null ? "open" : ""}`}
                    style={{ left: share(row.start), width: `max(2px, ${share(start + until - row.start)})` }} />
                  {row.ticks.map((tick, j) => <i key={j} class="tick" title={tick.label} style={{ left: share(tick.at) }} />)}
                </span>
                <span class="took">{row.end === null ? "…" : seconds(until - row.start)}</span>
              </li>
            );
          })}
        </ol>
        <p class="scale muted" aria-hidden="true"><span>0</span><span>{seconds((end - start) / 2)}</span><span>{seconds(end - start)}</span></p>
      </section>
      <section class="card" aria-labelledby="events-title">
        <h2 id="events-title">Events</h2>
        <div class="scroll" tabIndex={0} role="region" aria-label="Events">
          <table class="sums">
            <thead><tr><th scope="col">After</th><th scope="col">Event</th><th scope="col">Choice</th><th scope="col">Tokens</th><th scope="col">Where and why</th></tr></thead>
            <tbody>
              {journey.events.map((event, i) => (
                <tr key={i}><td>{seconds(event.at - start)}</td><th scope="row">{event.kind.replace("_", " ")}</th>
                  <td>{event.choice ?? 0}</td><td>{event.tokens ?? ""}</td>
                  <td title={event.address}>{[event.address && shortAddress(event.address), event.detail].filter(Boolean).join(": ")}</td></tr>
              ))}
            </tbody>
          </table>
        </div>
        {journey.left_out > 0 && <p class="muted">{journey.left_out} more events were not kept.</p>}
      </section>
    </>
  );
}
