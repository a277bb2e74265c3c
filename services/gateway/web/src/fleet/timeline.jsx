// The engines' steps as they come, a lane a worker. Each step is a block as long as it took,
// coloured by the share of its tokens that were prompt (prefill) and output (decode); hatched
// is time for which the engine had nothing to run although requests were there.
import { useEffect, useRef, useState } from "preact/hooks";
import { count, percent, seconds, shortAddress } from "../format.js";
import { gatewayNow, steps } from "../live.js";
import { useColors } from "./colors.js";

const LANE = 34;
const GAP = 8;
const AXIS = 20;
const MAX_LANES = 24;
const DELAY = 0.35; // what is newest arrives that late: the view's right edge lags by it
const NARROW = 560; // pixels
const SPANS = [2, 5, 15, 60];

export function Timeline({ workers }) {
  const [window, setWindow] = useState(5);
  const [paused, setPaused] = useState(false);
  const [hover, setHover] = useState(null);
  const lanes = workers.slice(0, MAX_LANES).map(({ address }) => address);
  const canvas = useRef();
  const edge = useRef(0);
  const colors = useColors();
  useDrawing(canvas, edge, lanes, window, paused, colors);
  const point = (event) => setHover(stepAt(event, canvas.current, edge.current, lanes, window));
  return (
    <section class="card timeline" aria-labelledby="timeline-title">
      <div class="timeline-bar">
        <h2 id="timeline-title">Engine steps</h2>
        <small class="key prefill">prefill</small>
        <small class="key decode">decode</small>
        <small class="key bubble">bubble</small>
        <span class="spacer" />
        <div class="switch" role="group" aria-label="How much time to show">
          {SPANS.map((each) => (
            <button key={each} type="button" aria-pressed={each === window} onClick={() => setWindow(each)}>{each} s</button>
          ))}
        </div>
        <button type="button" aria-pressed={paused} onClick={() => setPaused(!paused)}>{paused ? "Go on" : "Hold"}</button>
      </div>
      <div class="lanes">
        <ol class="lane-names">{lanes.map((address) => <li key={address} title={address}>{shortAddress(address)}</li>)}</ol>
        <canvas ref={canvas} role="img" aria-label="The engines' steps; their sums are in the table that follows"
          style={{ height: `${lanes.length * (LANE + GAP) + AXIS}px` }}
          onMouseMove={point} onMouseLeave={() => setHover(null)} />
      </div>
      <p class="hover muted" aria-hidden="true">{hover ?? "Point at a step to see what it computed."}</p>
      <Sums lanes={lanes} window={window} />
    </section>
  );
}

function useDrawing(canvas, edge, lanes, window, paused, colors) {
  const latest = useRef();
  latest.current = { lanes, window, colors };
  useEffect(() => {
    if (paused) return undefined;
    const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    let frame = 0;
    let drawn = 0;
    const draw = (time) => {
      frame = requestAnimationFrame(draw);
      if (!canvas.current) return; // the view has just been left
      if (time - drawn < (calm ? 1000 : 33)) return;
      drawn = time;
      edge.current = gatewayNow() - DELAY;
      paint(canvas.current, latest.current, edge.current);
    };
    frame = requestAnimationFrame(draw);
    return () => cancelAnimationFrame(frame);
  }, [paused]);
  useEffect(() => {
    if (paused && canvas.current) paint(canvas.current, latest.current, edge.current);
  }, [window, colors, lanes.length, paused]);
}

function paint(canvas, { lanes, window, colors }, end) {
  const ratio = devicePixelRatio;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
  if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  const x = (time) => ((time - end + window) / window) * width;
  lanes.forEach((address, i) => {
    const top = i * (LANE + GAP);
    context.fillStyle = colors.line;
    context.globalAlpha = 0.45;
    context.fillRect(0, top, width, LANE);
    context.globalAlpha = 1;
    paintLane(context, steps.get(address) ?? [], top, x, end - window, colors);
    if (width < NARROW) paintName(context, shortAddress(address), top, colors);
  });
  paintAxis(context, width, height, window, end, colors);
}

/** On a phone the lanes have their names in them. */
function paintName(context, name, top, colors) {
  context.font = "600 11px system-ui, sans-serif";
  context.textAlign = "left";
  context.fillStyle = colors.surface;
  context.fillRect(0, top, context.measureText(name).width + 12, 16);
  context.fillStyle = colors.ink;
  context.fillText(name, 6, top + 12);
}

function paintLane(context, lane, top, x, start, colors) {
  let before = -Infinity;
  for (const step of lane) {
    const began = Math.max(step.began, before); // when it ended is known a little late
    const ended = step.began + step.duration;
    before = Math.max(ended, before);
    if (ended < start) continue;
    const left = x(began);
    const width = Math.max(x(ended) - left - (x(ended) - left > 3 ? 0.75 : 0), 0.75);
    if (step.bubble > 0) hatch(context, x(began - step.bubble), top, left - x(began - step.bubble), colors);
    const share = step.prefill / (step.prefill + step.decode || 1);
    const prefill = share && Math.max(share * LANE, 4);
    context.fillStyle = colors.prefill;
    context.fillRect(left, top, width, prefill);
    context.fillStyle = colors.decode;
    context.fillRect(left, top + prefill, width, LANE - prefill);
  }
}

function hatch(context, left, top, width, colors) {
  if (width < 0.5) return;
  context.save();
  context.beginPath();
  context.rect(left, top, width, LANE);
  context.clip();
  context.strokeStyle = colors.bubble;
  context.lineWidth = 1;
  context.beginPath();
  for (let at = left - LANE; at < left + width; at += 5) {
    context.moveTo(at, top + LANE);
    context.lineTo(at + LANE, top);
  }
  context.stroke();
  context.restore();
}

function paintAxis(context, width, height, window, end, colors) {
  context.fillStyle = colors.muted;
  context.font = "11px system-ui, sans-serif";
  const parts = width < 420 ? 2 : 5;
  for (let i = 0; i <= parts; i += 1) {
    const ago = (window * (parts - i)) / parts;
    context.textAlign = i === 0 ? "left" : i === parts ? "right" : "center";
    context.fillText(ago ? `-${Number(ago.toFixed(1))} s` : "now", (width * i) / parts, height - 4);
  }
}

function stepAt(event, canvas, end, lanes, window) {
  const box = canvas.getBoundingClientRect();
  const time = end - window + ((event.clientX - box.left) / box.width) * window;
  const address = lanes[Math.floor((event.clientY - box.top) / (LANE + GAP))];
  const lane = steps.get(address) ?? [];
  const step = lane.find(({ began, duration, bubble }) => began - bubble <= time && time <= began + duration);
  if (!step) return null;
  const bubble = step.bubble > 0.0005 ? `, after ${seconds(step.bubble)} of bubble` : "";
  return `${shortAddress(address)} step ${count(step.number)}: ${seconds(step.duration)}, ${count(step.prefill)} prefill and ${count(step.decode)} decode tokens${bubble}`;
}

/** What the canvas shows, as numbers. */
function Sums({ lanes, window }) {
  const start = gatewayNow() - window;
  return (
    <details>
      <summary>As numbers</summary>
      <div class="scroll" tabIndex={0} role="region" aria-label="Sums of the steps">
        <table class="sums">
          <thead><tr><th scope="col">Worker</th><th scope="col">Steps</th><th scope="col">Prefill tokens</th>
            <th scope="col">Decode tokens</th><th scope="col">Busy</th><th scope="col">Bubble</th></tr></thead>
          <tbody>
            {lanes.map((address) => {
              const lane = (steps.get(address) ?? []).filter(({ began }) => began >= start);
              const sum = (name) => lane.reduce((total, step) => total + step[name], 0);
              return (
                <tr key={address}><th scope="row">{shortAddress(address)}</th><td>{count(lane.length)}</td>
                  <td>{count(sum("prefill"))}</td><td>{count(sum("decode"))}</td>
                  <td>{percent(Math.min(1, sum("duration") / window))}</td><td>{percent(sum("bubble") / window)}</td></tr>
              );
            })}
          </tbody>
        </table>
      </div>
    </details>
  );
}
