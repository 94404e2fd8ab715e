// Health: whether the server answers, how fast, what fails, and who waits; now, and against the hours before.

import { link } from "../address.js";
import { call } from "../api.js";
import { Chart } from "../chart.js";
import { useLive } from "../live.js";
import {
  ErrorNotice, Notice, Panel, Table, formatBytes, formatCount, formatNumber, formatSeconds, formatShare, formatTime,
  useLoad,
} from "../ui.js";
import { html, useEffect, useState } from "../vendor/preact.js";

const RANGES = [1, 6, 24];
const RELOAD_MS = 30_000;
// Statuses of answers -> what they mean.
const KINDS = [
  { name: "answered", color: "var(--c0)", has: (status) => status >= 200 && status < 400 },
  { name: "refused by the request (4xx)", color: "var(--c3)", has: (status) => status >= 400 && status < 500 && status !== 429 },
  { name: "limit or quota (429)", color: "var(--c1)", has: (status) => status === 429 },
  { name: "not ready (503)", color: "var(--c2)", has: (status) => status === 503 },
  { name: "disk full (507)", color: "var(--c4)", has: (status) => status === 507 },
  { name: "server error (5xx)", color: "var(--c5)", has: (status) => status >= 500 && status !== 503 && status !== 507 },
  { name: "client left", color: "var(--c6)", has: (status) => status === 0 },
];

const countOf = (answers, kind) =>
  Object.entries(answers).reduce((sum, [status, count]) => sum + (kind.has(Number(status)) ? count : 0), 0);
const total = (answers) => Object.values(answers).reduce((sum, count) => sum + count, 0);
const largest = (values) => values.reduce((best, value) => (value !== null && (best === null || value > best) ? value : best), null);

// One set of numbers over some points: rates per second, and the slowest times.
function sumUp(points) {
  const seconds = points.reduce((sum, point) => sum + point.minutes * 60, 0);
  const rate = (count) => (seconds ? points.reduce((sum, point) => sum + count(point), 0) / seconds : null);
  const weigh = (name, at) => {
    const counted = points.filter((point) => point[name][3] > 0);
    const count = counted.reduce((sum, point) => sum + point[name][3], 0);
    return count ? counted.reduce((sum, point) => sum + point[name][at] * point[name][3], 0) / count : null;
  };
  return {
    requests: rate((point) => total(point.answers)),
    kinds: KINDS.map((kind) => points.reduce((sum, point) => sum + countOf(point.answers, kind), 0)),
    tokens: rate((point) => point.tokens),
    firstToken: [weigh("first_token", 0), largest(points.map((point) => point.first_token[2]))],
    gap: [weigh("gap", 0), largest(points.map((point) => point.gap[2]))],
    waiting: largest(points.map((point) => point.waiting)),
  };
}

const shown = (value, format) => (value === null || value === undefined ? "–" : format(value));
// A number stays on a line with its unit.
const joined = (seconds) => shown(seconds, formatSeconds).replace(" ", "\u00a0");
const both = (times) => `${joined(times[0])} / ${joined(times[1])}`;
const span = (hours) => (hours === 1 ? "hour" : `${hours} hours`);

// A number of the last minutes, and the same number over the range.
const Now = ({ name, now, before, hours, isBad = false }) => html`
  <div class=${isBad ? "figure bad" : "figure"}>
    <dt>${name}</dt><dd>${now}</dd>
    ${before !== undefined && html`<dd class="before">${before} in the last ${span(hours)}</dd>`}
  </div>`;

function State({ history, frame }) {
  const holding = history.conditions.filter((one) => one.holds);
  const isDown = frame === null;
  const since = formatTime(history.started);
  if (isDown) {
    return html`<${Notice} kind="error">No engine answers, so requests get a 503. It may be starting. The server runs since ${since}.</${Notice}>`;
  }
  if (holding.length === 0) return html`<${Notice} kind="good">Serving since ${since}. No condition needs a person.</${Notice}>`;
  return html`
    ${holding.map((one) => html`
      <${Notice} key=${one.name} kind=${one.severity === "critical" ? "error" : "warning"}>${one.text} It has
        been so for ${one.minutes} min or longer. <code>${one.name}</code></${Notice}>`)}
    <p class="note">Serving since ${since}.</p>`;
}

// The failures of the range by status, the most frequent first. A status is one row, whatever its routes are, because the
// server counts its tenants by status alone. routes: [[route, count]], the most frequent first.
function listFailures(points) {
  const found = new Map();
  for (const point of points) {
    for (const [name, count] of Object.entries(point.failures)) {
      const [status, ...words] = name.split(" ");
      const route = words.join(" ");
      const one = found.get(status) ?? { status, routes: {}, count: 0, first: point.at, last: 0 };
      one.routes[route] = (one.routes[route] ?? 0) + count;
      found.set(status, { ...one, count: one.count + count, last: point.at });
    }
  }
  return [...found.values()].sort((one, other) => other.count - one.count)
    .map((one) => ({ ...one, routes: Object.entries(one.routes).sort(([, count], [, other]) => other - count) }));
}

// The tenants that got a status in the range, those with the most answers first: status -> [[tenant, count]].
function listFailing(points) {
  const sums = {};
  for (const point of points) {
    for (const [name, count] of Object.entries(point.failing)) {
      const [status, tenant] = name.split(" ");
      sums[status] ??= {};
      sums[status][tenant] = (sums[status][tenant] ?? 0) + count;
    }
  }
  return (status) => Object.entries(sums[status] ?? {}).sort(([, one], [, other]) => other - one);
}

const OTHERS = "others";
const Failing = ({ tenants }) => tenants.slice(0, 3).map(([tenant, count], at) => html`${at > 0 && ", "}${tenant === OTHERS
  ? tenant : html`<a href=${link("tenants", tenant)}>${tenant}</a>`} ${formatCount(count)}`);

const Routes = ({ routes }) => html`${routes.slice(0, 3).map(([route, count], at) => html`${at > 0 && ", "}<code>${route}</code>${
  routes.length > 1 && ` ${formatCount(count)}`}`)}${routes.length > 3 && ` and ${routes.length - 3} more`}`;

// What happened to the server in the range, newest first.
function listEvents(points, step) {
  const events = [];
  points.forEach((point, at) => {
    for (const [process, count] of Object.entries(point.restarts)) {
      events.push({ time: point.at, text: `The process ${process} died and was restarted${count > 1 ? ` (${count} times)` : ""}.` });
    }
    const last = points[at - 1];
    if (last === undefined) return;
    const missing = Math.round((point.at - last.at - step) / 60);
    if (missing > 0) events.push({ time: last.at + step, text: `The server did not run, or could not record, for ${missing} min.` });
    if (point.ready !== last.ready) events.push({ time: point.at, text: point.ready ? "The server was ready." : "The server was not ready." });
    if (point.read_only !== last.read_only) {
      events.push({ time: point.at, text: point.read_only ? "The disk was full." : "The disk had room again." });
    }
  });
  return events.reverse();
}

const why = ({ waiting, running, first_token: firstToken, interval }) => {
  if (waiting > 0 && running === 0) return "waits for its turn or for its adapter";
  if (waiting > 0) return `has ${formatCount(waiting + running)} sequences, of which ${formatCount(running)} run at once`;
  if (firstToken === null && interval === null) return "";
  return "computed without a queue";
};

function Tenants({ frame }) {
  const rows = [...frame.tenants].filter((one) => one.tenant !== null)
    .sort((one, other) => (other.first_token?.p99 ?? 0) - (one.first_token?.p99 ?? 0));
  const pages = frame.pool.num_pages;
  const held = (one) => one.kv + one.prefixes + one.adapters + one.idle_adapters;
  return html`
    <${Table} caption="Tenants, the slowest first" rows=${rows} rowKey=${(one) => one.tenant} empty="No tenant sends requests now." columns=${[
      { name: "Tenant", cell: (one) => html`<a href=${link("tenants", one.tenant)}>${one.tenant}</a>` },
      { name: "TTFT p50 / p99", isNumber: true, cell: (one) => both([one.first_token?.p50, one.first_token?.p99]) },
      { name: "ITL p50 / p99", isNumber: true, cell: (one) => both([one.interval?.p50, one.interval?.p99]) },
      { name: "Waiting", isNumber: true, cell: (one) => one.waiting },
      { name: "Running", isNumber: true, cell: (one) => one.running },
      { name: "Tokens/s", isNumber: true, cell: (one) => formatNumber(one.tokens_per_s) },
      { name: "Pool", isNumber: true, cell: (one) => formatShare(held(one) / pages) },
      { name: "Why", cell: why },
    ]} />`;
}

function Conditions({ conditions }) {
  const numHolding = conditions.filter((one) => one.holds).length;
  const rows = [...conditions].sort((one, other) => other.holds - one.holds);
  return html`
    <details open=${numHolding > 0}>
      <summary>${numHolding === 0 ? "None" : numHolding} of ${conditions.length} conditions ${numHolding > 1 ? "hold" : "holds"} now</summary>
      <${Table} caption="Conditions, as the rules for Prometheus state them" rows=${rows} rowKey=${(one) => one.name} columns=${[
        { name: "Condition", cell: (one) => one.text },
        { name: "Now", cell: (one) => (one.holds ? html`<span class="tag lost">holds</span>` : html`<span class="tag">no</span>`) },
        { name: "For", isNumber: true, cell: (one) => `${one.minutes} min` },
        { name: "Rule", cell: (one) => html`<code>${one.name}</code>` },
      ]} />
    </details>`;
}

export function View({ me }) {
  const { frame } = useLive(me);
  const [hours, setHours] = useState(1);
  const { value: history, error, reload } = useLoad((signal) => call(`admin/history?hours=${hours}`, { signal }), [hours]);
  useEffect(() => {
    const timer = setInterval(() => document.hidden || reload(), RELOAD_MS);
    return () => clearInterval(timer);
  }, [reload]);
  if (history === null) return error ? html`<${ErrorNotice} error=${error} />` : html`<${Notice}>Loading the history …</${Notice}>`;
  const points = history.points.map((point) => ({ ...point, time: point.at + history.step / 2 }));
  const newest = points.at(-1);
  const recent = sumUp(history.recent === null ? [] : [history.recent]);
  const all = sumUp(points);
  const pool = frame?.pool;
  const used = pool ? (pool.num_pages - pool.counts.free) / pool.num_pages : null;
  const rateOf = (kind) => (point) => countOf(point.answers, kind) / (point.minutes * 60);
  const failed = recent.kinds[3] + recent.kinds[4] + recent.kinds[5];
  const seriesOf = (name) => [
    { name: "p50", color: "var(--c1)", value: (point) => point[name][0] },
    { name: "p99", color: "var(--c2)", value: (point) => point[name][2] },
  ];
  const ranges = html`<span class="ranges" role="group" aria-label="Range of the history">${RANGES.map((one) => html`
    <button key=${one} aria-pressed=${one === hours} onClick=${() => setHours(one)}>${one} h</button>`)}</span>`;
  const failing = listFailing(points);
  const kindsSeen = KINDS.filter((kind, at) => at === 0 || all.kinds[at] > 0);
  return html`
    ${error && html`<${ErrorNotice} error=${error} />`}
    <${State} history=${history} frame=${frame} />
    <div class="panels">
      <${Panel} title="The last five minutes" actions=${ranges} wide>
        <dl class="figures wider">
          <${Now} name="Requests/s" now=${shown(recent.requests, formatNumber)} before=${shown(all.requests, formatNumber)} hours=${hours} />
          <${Now} name="Server errors" now=${formatCount(failed)} before=${formatCount(all.kinds[3] + all.kinds[4] + all.kinds[5])}
            hours=${hours} isBad=${failed > 0} />
          <${Now} name="Refused: 429" now=${formatCount(recent.kinds[2])} before=${formatCount(all.kinds[2])} hours=${hours} />
          <${Now} name="TTFT p50 / p99" now=${both(recent.firstToken)} before=${both(all.firstToken)} hours=${hours} />
          <${Now} name="ITL p50 / p99" now=${both(recent.gap)} before=${both(all.gap)} hours=${hours} />
          <${Now} name="Tokens/s" now=${shown(recent.tokens, formatNumber)} before=${shown(all.tokens, formatNumber)} hours=${hours} />
          <${Now} name="Queue now" now=${shown(frame?.traffic.waiting, formatCount)} before=${`at most ${shown(all.waiting, formatCount)}`} hours=${hours} />
          <${Now} name="Pool used now" now=${shown(used, formatShare)} />
          <${Now} name="Disk free" now=${shown(newest?.disk_free, formatBytes)} isBad=${newest?.read_only ?? false} />
          <${Now} name="Engines serving" now=${newest ? `${newest.engines[0]} of ${newest.engines[1]}` : "–"}
            isBad=${newest !== undefined && newest.engines[0] < newest.engines[1]} />
        </dl>
      </${Panel}>
    </div>
    <div class="panels halves">
      ${frame && html`<${Panel} title="Who is slow" wide><${Tenants} frame=${frame} /></${Panel}>`}
      <${Panel} title=${`What failed in the last ${span(hours)}`} wide>
        <${Table} caption="Failed requests" rows=${listFailures(points)} rowKey=${(one) => one.status} empty="Nothing failed." columns=${[
          { name: "Status", cell: (one) => one.status },
          { name: "Routes", cell: (one) => html`<${Routes} routes=${one.routes} />` },
          { name: "Answers", isNumber: true, cell: (one) => formatCount(one.count) },
          { name: "Whose", cell: (one) => html`<${Failing} tenants=${failing(one.status)} />` },
          { name: "First", cell: (one) => formatTime(one.first) },
          { name: "Last", cell: (one) => formatTime(one.last) },
          { name: "State", cell: (one) => (history.time - one.last < (history.step + 120) ? html`<span class="tag lost">now</span>` : "over") },
        ]} />
      </${Panel}>
      <${Panel} title="Requests per second by outcome">
        <${Chart} title="Requests per second" points=${points} format=${formatNumber} stacked
          series=${kindsSeen.map((kind) => ({ ...kind, value: rateOf(kind) }))} />
      </${Panel}>
      <${Panel} title="Time to first token">
        <${Chart} title="Time to first token" points=${points} format=${formatSeconds} series=${seriesOf("first_token")} />
      </${Panel}>
      <${Panel} title="Time between tokens">
        <${Chart} title="Time between tokens" points=${points} format=${formatSeconds} series=${seriesOf("gap")} />
      </${Panel}>
      <${Panel} title="Generated tokens per second">
        <${Chart} title="Generated tokens per second" points=${points} format=${formatNumber}
          series=${[{ name: "tokens/s", color: "var(--c0)", value: (point) => point.tokens / (point.minutes * 60) }]} />
      </${Panel}>
      <${Panel} title="Events" wide>
        <${Table} caption="Events of the server" rows=${listEvents(points, history.step)} rowKey=${(one) => `${one.time} ${one.text}`} empty="Nothing happened." columns=${[
          { name: "Time", cell: (one) => formatTime(one.time) },
          { name: "Event", cell: (one) => one.text },
        ]} />
        <p class="note">Changes by people are in the <a href="#/audit">audit log</a>.</p>
      </${Panel}>
      <${Panel} title="Conditions" wide><${Conditions} conditions=${history.conditions} /></${Panel}>
    </div>`;
}
