// What was used in a period: tokens over time, and sums by model.

import { ErrorNotice, Panel, Table, formatBytes, formatCount, formatNumber, formatTime, useLoad } from "../ui.js";
import { addUp, loadUsage } from "../usage.js";
import { html, useState } from "../vendor/preact.js";

const PERIODS = [
  { id: "hour", title: "Last hour", width: "1m", limit: 60 },
  { id: "day", title: "Last 24 hours", width: "1h", limit: 24 },
  { id: "month", title: "Last 30 days", width: "1d", limit: 30 },
];

// route: `v1/usage`, or `admin/usage?tenant=...`.
export function UsagePanel({ route }) {
  const [id, setId] = useState("day");
  const period = PERIODS.find((one) => one.id === id);
  const { width, limit } = period;
  const total = useLoad((signal) => loadUsage(route, { width, limit }, signal), [route, id]);
  const models = useLoad((signal) => loadUsage(route, { width, limit, groups: "model" }, signal), [route, id]);
  const results = models.value?.buckets.flatMap((bucket) => bucket.results) ?? [];
  const rows = [...addUp(results, (one) => one.model ?? `deleted ${one.adapter_digest?.slice(0, 19)}`).values()]
    .sort((one, other) => other.input + other.output - one.input - one.output);
  const columns = [
    { name: "Model", cell: (one) => one.key },
    { name: "Requests", isNumber: true, cell: (one) => formatCount(one.requests) },
    { name: "Tokens in", isNumber: true, cell: (one) => formatCount(one.input) },
    { name: "of them cached", isNumber: true, cell: (one) => formatCount(one.cached) },
    { name: "Tokens out", isNumber: true, cell: (one) => formatCount(one.output) },
    { name: "Adapters loaded", isNumber: true, cell: (one) => formatBytes(one.adapterBytes) },
    { name: "Page seconds", isNumber: true, cell: (one) => formatNumber(one.pageSeconds) },
  ];
  const reload = () => [total, models].forEach((one) => one.reload());
  return html`
    <${Panel} title="Usage" wide actions=${html`<span class="row-actions">
        <select aria-label="Period" value=${id} onChange=${(event) => setId(event.target.value)}>
          ${PERIODS.map((one) => html`<option key=${one.id} value=${one.id}>${one.title}</option>`)}</select>
        <button onClick=${reload}>Refresh</button></span>`}>
      <${ErrorNotice} error=${total.error ?? models.error} />
      ${total.value && html`<${Chart} buckets=${total.value.buckets} title=${period.title} />`}
      ${models.value && html`<${Table} caption="Usage by model" columns=${columns} rows=${rows}
        rowKey=${(one) => one.key} empty="Nothing was used in this period." />`}
      ${models.value?.isCut && html`<p class="note">There are more models than one page shows. All of them:
        <code>slora usage --by day --group-by model --csv</code></p>`}
      <p class="note">Sums appear a few seconds after the end of a request. Times of buckets are in your time zone, and
        days begin at midnight UTC.</p>
    </${Panel}>`;
}

// Bars of the tokens of each bucket.
function Chart({ buckets, title }) {
  const bars = buckets.map((bucket) => {
    const sums = [...addUp(bucket.results, () => "all").values()][0] ?? { input: 0, output: 0 };
    return { at: bucket.start_time, input: sums.input, output: sums.output };
  });
  const highest = Math.max(...bars.map((one) => one.input + one.output));
  if (bars.length === 0 || highest === 0) return null;
  const high = (tokens) => (tokens / highest) * 100;
  const all = bars.reduce((sum, one) => sum + one.input + one.output, 0);
  return html`
    <figure class="usage-chart">
      <svg viewBox=${`0 0 ${bars.length * 10} 100`} preserveAspectRatio="none" role="img"
        aria-label=${`${title}: ${formatCount(all)} tokens, at most ${formatCount(highest)} in one bar`}>
        ${bars.map((one, index) => html`
          <g key=${one.at}>
            <title>${`${formatTime(one.at)}: ${formatCount(one.input)} tokens in, ${formatCount(one.output)} out`}</title>
            <rect class="back" x=${index * 10} y="0" width="10" height="100" />
            <rect class="part-0" x=${index * 10 + 1} width="8" y=${100 - high(one.input)} height=${high(one.input)} />
            <rect class="part-1" x=${index * 10 + 1} width="8" y=${100 - high(one.input + one.output)}
              height=${high(one.output)} />
          </g>`)}
      </svg>
      <figcaption class="note"><span>${formatTime(bars[0].at)}</span>
        <span><i class="key part-0"></i> in <i class="key part-1"></i> out · highest bar ${formatCount(highest)} tokens</span>
        <span>${formatTime(bars.at(-1).at)}</span></figcaption>
    </figure>`;
}
