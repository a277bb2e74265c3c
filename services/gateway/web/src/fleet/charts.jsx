// Three charts of the last three minutes: throughput, TTFT, time between chunks.
import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import { rate, seconds } from "../format.js";
import { history } from "../live.js";
import { useStore } from "../store.js";
import { useColors } from "./colors.js";

const HEIGHT = 150;
const CHARTS = [
  {
    title: "Tokens a second", format: rate, bars: true,
    series: [["out", "tokensOut", "decode"], ["in", "tokensIn", "prefill"]],
  },
  { title: "TTFT", format: seconds, series: [["p50", "ttft50", "decode"], ["p99", "ttft99", "prefill"]] },
  { title: "Time between chunks", format: seconds, series: [["p50", "itl50", "decode"], ["p99", "itl99", "prefill"]] },
];

export function Charts() {
  const rows = useStore(history);
  return (
    <section class="charts" aria-label="Charts of the last three minutes">
      {CHARTS.map((chart) => <Chart key={chart.title} {...chart} rows={rows} />)}
    </section>
  );
}

function Chart({ title, format, series, bars, rows }) {
  const host = useRef();
  const plot = useRef();
  const colors = useColors();
  useEffect(() => {
    const element = host.current;
    plot.current = new uPlot(options(element.clientWidth, format, series, bars, colors), data([], series), element);
    const observer = new ResizeObserver(() =>
      plot.current.setSize({ width: element.clientWidth, height: HEIGHT }),
    );
    observer.observe(element);
    return () => {
      observer.disconnect();
      plot.current.destroy();
    };
  }, [colors]);
  useEffect(() => plot.current.setData(data(rows, series)), [rows, colors]);
  const last = (name) => rows.findLast((row) => row[name] !== null)?.[name];
  const spoken = series.map(([label, name]) => `${label} ${format(last(name))}`).join(", ");
  return (
    <figure class="card chart">
      <figcaption>
        <span>{title}</span>
        {series.map(([label, name, color]) => (
          <small key={name} class={`key ${color}`}>{label}</small>
        ))}
      </figcaption>
      <div ref={host} role="img" aria-label={`${title}, last: ${spoken}`} />
    </figure>
  );
}

/** Seconds before now on the x axis; a point for each whole second. */
function data(rows, series) {
  const end = rows.length ? rows[rows.length - 1].at : 0;
  return [rows.map(({ at }) => at - end), ...series.map(([, name]) => rows.map((row) => row[name]))];
}

function options(width, format, series, bars, colors) {
  const axis = { stroke: colors.muted, grid: { stroke: colors.line, width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  const none = { stroke: colors.muted, ticks: { show: false }, grid: { show: false }, font: "11px system-ui" };
  return {
    width, height: HEIGHT,
    legend: { show: false },
    cursor: { points: { size: 6 }, y: false },
    scales: {
      x: { time: false, range: [-178, 0] },
      y: { range: (_, low, high) => [0, (high || (bars ? 10 : 0.1)) * 1.1] },
    },
    axes: [
      { ...none, size: 24, splits: () => [-180, -120, -60, 0], values: (_, at) => at.map((x) => (x ? `${x} s` : "now")) },
      { ...axis, size: 54, values: (_, values) => values.map((value) => (value ? format(value) : "0")) },
    ],
    series: [
      {},
      ...series.map(([label, , color]) => ({
        label, stroke: colors[color], width: 1.75, spanGaps: !bars,
        fill: bars ? `${colors[color]}33` : undefined, points: { show: !bars, size: 4, fill: colors[color] },
      })),
    ],
  };
}
