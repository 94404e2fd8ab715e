// Traffic: tokens, queue, times, and which adapters the engine computes with.

import { Chart } from "../chart.js";
import { colorOf, cssColor } from "../colors.js";
import { useLive } from "../live.js";
import { Figure, Notice, Panel, Table, formatNumber, formatSeconds, formatShare, sortByName } from "../ui.js";
import { html } from "../vendor/preact.js";

const quantile = (kind, name) => (point) => point.traffic[kind]?.[name] ?? null;
const times = (kind) => [
  { name: "p50", color: "var(--c1)", value: quantile(kind, "p50") },
  { name: "p99", color: "var(--c2)", value: quantile(kind, "p99") },
];

// others: the name of all work that is not listed.
function Work({ adapters, others }) {
  const nameOf = ({ tenant, adapter }) => {
    if (tenant === null) return others;
    return adapter === null ? `base model (${tenant})` : `${adapter} (${tenant})`;
  };
  if (adapters.length === 0) return html`<p class="note">The engine has computed nothing in the last seconds.</p>`;
  return html`
    <div class="bar-chart" aria-hidden="true">${adapters.map((one) => html`
      <i key=${nameOf(one)} class=${one.adapter === null && one.tenant !== null ? "base" : ""}
        style=${{ width: `${one.share * 100}%`, background: cssColor(colorOf(one.tenant)) }} title=${nameOf(one)}></i>`)}
    </div>
    <${Table} caption="Share of the computed tokens by adapter" rows=${adapters} rowKey=${nameOf} columns=${[
      { name: "Adapter", cell: (one) => html`<i class="swatch" style=${{ background: cssColor(colorOf(one.tenant)) }}></i>${
        one.adapter ?? (one.tenant === null ? others : "base model")}` },
      { name: "Tenant", cell: (one) => one.tenant ?? "" },
      { name: "Share", cell: (one) => formatShare(one.share), isNumber: true },
    ]} />`;
}

export function View({ me }) {
  const { frame, points } = useLive(me);
  if (frame === undefined) return html`<${Notice}>Waiting for the first frame …</${Notice}>`;
  if (frame === null) {
    return html`<${Notice} kind="warning">No engine answers. It may be starting; the view continues by itself.</${Notice}>`;
  }
  const { traffic } = frame;
  const [adapters, tenants] = [frame.adapters, frame.tenants].map(sortByName);
  const whose = me.tenant === null ? "all tenants" : me.tenant;
  return html`
    <div class="panels">
      <${Panel} title="Now: ${whose}" wide>
        <dl class="figures">
          <${Figure} name="Generated" value=${formatNumber(traffic.tokens_per_s)} unit="tokens/s" />
          <${Figure} name="Running" value=${traffic.running} unit="sequences" />
          <${Figure} name="Waiting" value=${traffic.waiting} unit="sequences" />
          ${traffic.awaiting_adapter !== null && html`
            <${Figure} name="Waiting for an adapter" value=${traffic.awaiting_adapter} unit="sequences" />`}
          <${Figure} name="TTFT, median" value=${formatSeconds(traffic.first_token?.p50)} title="time to first token" />
          <${Figure} name="ITL, median" value=${formatSeconds(traffic.interval?.p50)} title="time between two tokens" />
          <${Figure} name="Steps" value=${formatNumber(traffic.steps_per_s)} unit="per s" />
          <${Figure} name="Tokens in a step" value=${formatNumber(traffic.tokens_per_step)} />
        </dl>
      </${Panel}>
      <${Panel} title="Generated tokens per second">
        <${Chart} title="Generated tokens per second" points=${points} format=${formatNumber}
          series=${[{ name: "tokens/s", color: "var(--c0)", value: (point) => point.traffic.tokens_per_s }]} />
      </${Panel}>
      <${Panel} title="Queue">
        <${Chart} title="Sequences" points=${points} format=${formatNumber} series=${[
          { name: "running", color: "var(--c0)", value: (point) => point.traffic.running },
          { name: "waiting", color: "var(--c2)", value: (point) => point.traffic.waiting },
        ]} />
      </${Panel}>
      <${Panel} title="Time to first token">
        <${Chart} title="Time to first token" points=${points} format=${formatSeconds} series=${times("first_token")} />
      </${Panel}>
      <${Panel} title="Time between tokens">
        <${Chart} title="Time between tokens" points=${points} format=${formatSeconds} series=${times("interval")} />
      </${Panel}>
      <${Panel} title="Step time of the engine">
        <${Chart} title="Step time" points=${points} format=${formatSeconds} series=${times("step")} />
      </${Panel}>
      <${Panel} title="Tokens in a step">
        <${Chart} title="Tokens in a step" points=${points} format=${formatNumber}
          series=${[{ name: "tokens", color: "var(--c3)", value: (point) => point.traffic.tokens_per_step }]} />
      </${Panel}>
    </div>
    <div class="panels halves">
      <${Panel} title="Batch by adapter"><${Work} adapters=${adapters}
        others=${me.tenant === null ? "other adapters" : "other tenants"} /></${Panel}>
      ${me.tenant === null && html`
        <${Panel} title="Tenants">
          <${Table} caption="Traffic by tenant" rows=${tenants} rowKey=${(one) => one.tenant ?? "/other"} columns=${[
            { name: "Tenant", cell: (one) => html`<i class="swatch" style=${{ background: cssColor(colorOf(one.tenant)) }}></i>${
              one.tenant ?? "other tenants"}` },
            { name: "Tokens/s", cell: (one) => formatNumber(one.tokens_per_s), isNumber: true },
            { name: "Running", cell: (one) => one.running, isNumber: true },
            { name: "Waiting", cell: (one) => one.waiting, isNumber: true },
          ]} />
        </${Panel}>`}
    </div>`;
}
