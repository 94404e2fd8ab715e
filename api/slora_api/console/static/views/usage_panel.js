// What was used in a period: tokens over time, sums by model, and what they cost at the operator's prices.

import { call } from "../api.js";
import { FormDialog } from "../dialog.js";
import { ErrorNotice, Panel, Table, formatBytes, formatCount, formatNumber, formatTime, useLoad } from "../ui.js";
import { addUp, loadUsage } from "../usage.js";
import { html, useState } from "../vendor/preact.js";

const PERIODS = [
  { id: "hour", title: "Last hour", width: "1m", limit: 60 },
  { id: "day", title: "Last 24 hours", width: "1h", limit: 24 },
  { id: "month", title: "Last 30 days", width: "1d", limit: 30 },
];
const MONTH_S = 30 * 86_400;
// A shorter time says little about a month.
const MIN_PACE_S = 600;
const KINDS = [["input", "Tokens in"], ["cached_input", "Tokens in that the prefix cache had"], ["output", "Tokens out"]];

// The cost of a sum, or null without prices. Tokens of the prefix cache have a price of their own. Tokens of batches are
// billed for less; how many of them the cache had is not known, so the whole input is reduced alike.
function costOf(sum, prices) {
  if (!hasPrices(prices)) return null;
  const input = (sum.input - sum.cached) * (prices.input ?? 0) + sum.cached * (prices.cached_input ?? 0);
  const billed = sum.input > 0 ? sum.billedInput / sum.input : 0;
  return (input * billed + sum.billedOutput * (prices.output ?? 0)) / 1e6;
}

const hasPrices = (prices) => prices !== null && (prices.input !== null || prices.output !== null);

function PriceForm({ prices, onClose, onChanged }) {
  const send = async (form) => {
    const read = (name) => (form.get(name) === "" ? null : Number(form.get(name)));
    const body = { currency: form.get("currency").trim() };
    for (const [name] of KINDS) body[name] = read(name);
    onChanged(await call("admin/prices", { method: "PUT", body }));
  };
  return html`
    <${FormDialog} title="Prices of a million tokens" verb="Set the prices" send=${send} onClose=${onClose}>
      <p>They hold for all tenants, who see what their usage costs. An empty field is no price.</p>
      <label>Currency <input name="currency" maxlength="8" size="8" defaultValue=${prices.currency} autocomplete="off" /></label>
      ${KINDS.map(([name, title]) => html`<label key=${name}>${title}
        <input name=${name} type="number" min="0" max="1000000" step="any" defaultValue=${prices[name] ?? ""} /></label>`)}
    </${FormDialog}>`;
}

// Says which prices hold. An operator may change them.
function Prices({ prices, isOperator, onChanged }) {
  const [isOpen, setOpen] = useState(false);
  const show = (name) => `${formatNumber(prices[name] ?? 0)} ${prices.currency}`.trim();
  return html`
    <p class="note">${hasPrices(prices)
      ? `The operator's prices of a million tokens: in ${show("input")}, cached ${show("cached_input")}, out ${show("output")}.`
      : "There are no prices, so there is no cost."}
      ${isOperator && html`${" "}<button onClick=${() => setOpen(true)}>Set the prices</button>`}</p>
    ${isOpen && html`<${PriceForm} prices=${prices} onClose=${() => setOpen(false)} onChanged=${onChanged} />`}`;
}

// Saves the rows as a file.
function saveCsv(columns, rows) {
  const quote = (value) => `"${String(value ?? "").replaceAll('"', '""')}"`;
  const lines = [columns.map(({ name }) => name), ...rows.map((row) => columns.map(({ raw }) => raw(row)))];
  const blob = new Blob([lines.map((line) => line.map(quote).join(",")).join("\r\n")], { type: "text/csv" });
  const anchor = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: "usage.csv" });
  anchor.click();
  URL.revokeObjectURL(anchor.href);
}

// route: `v1/usage`, or `admin/usage?tenant=...`.
export function UsagePanel({ route }) {
  const [id, setId] = useState("day");
  const period = PERIODS.find((one) => one.id === id);
  const { width, limit } = period;
  const total = useLoad((signal) => loadUsage(route, { width, limit }, signal), [route, id]);
  const models = useLoad((signal) => loadUsage(route, { width, limit, groups: "model" }, signal), [route, id]);
  const results = models.value?.buckets.flatMap((bucket) => bucket.results) ?? [];
  const rows = [...addUp(results, (one) => one.model ?? `deleted ${one.adapter_digest?.slice(0, 12)}`).values()]
    .sort((one, other) => other.input + other.output - one.input - one.output);
  const priced = useLoad((signal) => call("v1/prices", { signal }));
  const prices = priced.value;
  const count = (name, raw) => ({ name, raw, isNumber: true, cell: (one) => formatCount(raw(one)) });
  const columns = [
    { name: "Model", raw: (one) => one.key, cell: (one) => one.key },
    count("Requests", (one) => one.requests),
    count("Tokens in", (one) => one.input),
    count("of them cached", (one) => one.cached),
    count("Tokens out", (one) => one.output),
    { name: "Adapters loaded", raw: (one) => one.adapterBytes, isNumber: true, cell: (one) => formatBytes(one.adapterBytes) },
    { name: "Page seconds", raw: (one) => one.pageSeconds, isNumber: true, cell: (one) => formatNumber(one.pageSeconds) },
  ];
  const costs = rows.map((one) => costOf(one, prices));
  const wholeCost = costs.includes(null) || costs.length === 0 ? null : costs.reduce((sum, cost) => sum + cost, 0);
  if (wholeCost !== null) {
    const cost = (one) => costOf(one, prices);
    columns.push({ name: prices.currency ? `Cost in ${prices.currency}` : "Cost", raw: cost, isNumber: true, cell: (one) => formatNumber(cost(one)) });
  }
  // Extrapolates from the first bucket with usage on.
  const used = total.value?.buckets.filter((bucket) => bucket.results.length > 0) ?? [];
  const seconds = used.length > 0 ? Date.now() / 1000 - used[0].start_time : 0;
  const pace = wholeCost === null || seconds < MIN_PACE_S ? null : (wholeCost * MONTH_S) / Math.max(seconds, 1);
  const reload = () => [total, models, priced].forEach((one) => one.reload());
  return html`
    <${Panel} title="Usage" wide actions=${html`<span class="row-actions">
        <select aria-label="Period" value=${id} onChange=${(event) => setId(event.target.value)}>
          ${PERIODS.map((one) => html`<option key=${one.id} value=${one.id}>${one.title}</option>`)}</select>
        <button onClick=${() => saveCsv(columns, rows)} disabled=${rows.length === 0}>Save as CSV</button>
        <button onClick=${reload}>Refresh</button></span>`}>
      <${ErrorNotice} error=${total.error ?? models.error ?? priced.error} />
      ${total.value && html`<${Chart} buckets=${total.value.buckets} title=${period.title} />`}
      ${models.value && html`<${Table} caption="Usage by model" columns=${columns} rows=${rows}
        rowKey=${(one) => one.key} empty="Nothing was used in this period." />`}
      ${wholeCost !== null && html`<p><strong>Cost of the ${period.title.toLowerCase()}: ${formatNumber(wholeCost)} ${prices.currency}</strong>
        ${pace !== null && html`${" "}<span class="note">At this pace, 30 days cost ${formatNumber(pace)} ${prices.currency}.</span>`}</p>`}
      ${prices && html`<${Prices} prices=${prices} isOperator=${route.startsWith("admin/")} onChanged=${priced.reload} />`}
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
      <div class="axis" aria-hidden="true"><span>${formatNumber(highest)}</span><span>${formatNumber(highest / 2)}</span><span>0</span></div>
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
