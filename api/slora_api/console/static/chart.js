// Charts over time, in SVG.

import { useWidth } from "./ui.js";
import { html, useRef, useState } from "./vendor/preact.js";

const LEFT = 50, BOTTOM = 18, TOP = 12;
const MAX_COLUMNS = 240;
const MARKS = { load: "▲", eviction: "▼", prefix_eviction: "▽", preemption: "◆" };

// Thins the points out, so that a chart of minutes stays cheap to draw.
function thin(points) {
  const step = Math.ceil(points.length / MAX_COLUMNS);
  return points.filter((_, at) => (points.length - 1 - at) % step === 0);
}

function roundUp(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((factor) => factor * power).find((bound) => bound >= value);
}

// points: [{time, ...}], oldest first. series: [{name, color, value: point => number or null}]. stacked: areas on top of
// one another. height: in pixels. events: marks at their times. format(value) makes the texts.
export function Chart({ title, points, series, format, stacked = false, height = 160, events = [] }) {
  const [cursor, setCursor] = useState(null);
  const box = useRef(null);
  const width = useWidth(box);
  const shown = thin(points);
  if (shown.length < 2 || width === 0) {
    return html`<figure class="chart" ref=${box}><p class="note">The chart begins with the next frames.</p></figure>`;
  }
  const begin = shown[0].time, end = shown.at(-1).time;
  const rows = series.map((one) => shown.map((point) => one.value(point)));
  const sums = stacked ? shown.map((_, at) => rows.reduce((sum, row) => sum + (row[at] ?? 0), 0)) : rows.flat();
  const bound = roundUp(Math.max(...sums.filter((value) => value !== null), 0));
  // Two observations may have the same time, for instance while the clock of the server is set.
  const x = (time) => LEFT + ((width - LEFT) * (time - begin)) / (end - begin || 1);
  const y = (value) => TOP + (height - TOP - BOTTOM) * (1 - value / bound);
  const at = cursor === null ? shown.length - 1 : Math.min(cursor, shown.length - 1);

  function point(event) {
    const { left } = event.currentTarget.getBoundingClientRect();
    const time = begin + ((event.clientX - left - LEFT) / (width - LEFT)) * (end - begin);
    let best = 0;
    shown.forEach((one, index) => { if (Math.abs(one.time - time) < Math.abs(shown[best].time - time)) best = index; });
    setCursor(best);
  }

  const paths = stacked ? stack(rows, shown, x, y) : rows.map((row) => line(row, shown, x, y));
  const ticks = [0, bound / 2, bound];
  return html`
    <figure class="chart" ref=${box}>
      <svg width=${width} height=${height} role="img" aria-label=${`${title}: ${readOut(series, rows, at, format)}`}
        onPointerMove=${point} onPointerLeave=${() => setCursor(null)}>
        ${ticks.map((value) => html`<g key=${value}>
          <line class="grid" x1=${LEFT} x2=${width} y1=${y(value)} y2=${y(value)} />
          <text x=${LEFT - 6} y=${y(value) + 4} text-anchor="end">${format(value)}</text></g>`)}
        <text x=${LEFT} y=${height - 3}>${ago(end - begin)}</text>
        <text x=${width} y=${height - 3} text-anchor="end">now</text>
        ${series.map((one, index) => html`<path key=${one.name} d=${paths[index]} class=${stacked ? "area" : "line"}
          style=${stacked ? { fill: one.color } : { stroke: one.color }} />`)}
        ${marksOf(events, begin, end).map(({ kind, time }) => html`
          <text key=${kind + time} class="mark ${kind}" x=${x(time)} y="9" text-anchor="middle">${MARKS[kind]}</text>`)}
        ${cursor !== null && html`<line class="cursor" x1=${x(shown[at].time)} x2=${x(shown[at].time)} y1=${TOP}
          y2=${height - BOTTOM} />`}
      </svg>
      <figcaption>
        ${series.map((one, index) => html`<span key=${one.name}><i style=${{ background: one.color }}></i>${one.name}
          <b>${rows[index][at] === null ? "–" : format(rows[index][at])}</b></span>`)}
        ${cursor !== null && html`<span>${ago(end - shown[at].time)}</span>`}
      </figcaption>
    </figure>`;
}

const ago = (seconds) => (seconds < 90 ? `${Math.round(seconds)} s ago` : `${Math.round(seconds / 60)} min ago`);

const readOut = (series, rows, at, format) =>
  series.map(({ name }, index) => `${name} ${rows[index][at] === null ? "none" : format(rows[index][at])}`).join(", ");

function line(row, points, x, y) {
  let path = "", isDown = false;
  row.forEach((value, at) => {
    if (value === null) { isDown = false; return; }
    path += `${isDown ? "L" : "M"}${x(points[at].time).toFixed(1)} ${y(value).toFixed(1)}`;
    isDown = true;
  });
  return path;
}

function stack(rows, points, x, y) {
  const below = points.map(() => 0);
  return rows.map((row) => {
    const above = row.map((value, at) => below[at] + (value ?? 0));
    const upper = above.map((value, at) => `${x(points[at].time).toFixed(1)} ${y(value).toFixed(1)}`);
    const lower = below.map((value, at) => `${x(points[at].time).toFixed(1)} ${y(value).toFixed(1)}`).reverse();
    above.forEach((value, at) => (below[at] = value));
    return `M${[...upper, ...lower].join("L")}Z`;
  });
}

// One mark of each kind for each five seconds.
function marksOf(events, begin, end) {
  const found = new Map();
  for (const { kind, time } of events) {
    if (time >= begin && time <= end) found.set(`${kind} ${Math.floor(time / 5)}`, { kind, time });
  }
  return [...found.values()];
}

export const Marks = () => html`<p class="note marks">${Object.entries(MARKS).map(([kind, mark]) => html`
  <span key=${kind}><b class="mark ${kind}">${mark}</b> ${kind.replace("_", " ")}</span>`)}</p>`;
