// The adapters of a tenant. For an operator: the adapters that were used, and the pins.

import { call } from "../api.js";
import { link, useSubject } from "../address.js";
import { Adapter, Targets } from "./adapter.js";
import { OperatorAdapters } from "./operator_adapters.js";
import { Upload } from "./upload.js";
import { loadResidency } from "../residency.js";
import { loadTraffic } from "../usage.js";
import { Pager, usePages } from "../pages.js";
import { ErrorNotice, Panel, Table, formatBytes, formatCount, formatTime, useLoad } from "../ui.js";
import { html, useEffect, useState } from "../vendor/preact.js";

const PAGE = 25;

export function View({ me }) {
  const name = useSubject();
  if (me.tenant === null) return html`<${OperatorAdapters} />`;
  const mayRead = me.scopes.includes("adapters:read");
  if (mayRead && name !== null) return html`<${Adapter} me=${me} name=${name} key=${name} />`;
  return html`<${OwnAdapters} me=${me} mayRead=${mayRead} />`;
}

function OwnAdapters({ me, mayRead }) {
  const [round, setRound] = useState(0);
  return html`
    <div class="panels">
      ${mayRead && html`<${List} me=${me} round=${round} />`}
      ${me.scopes.includes("adapters:write") && html`
        <${Upload} mayUseHub=${me.scopes.includes("adapters:hub")} hasPages=${mayRead} onUploaded=${() => setRound((last) => last + 1)} />`}
    </div>`;
}

function List({ me, round }) {
  const list = usePages("v1/adapters", PAGE);
  const traffic = useLoad((signal) => loadTraffic(me, signal), [round]);
  const residency = useLoad((signal) => loadResidency(me, signal), [round]);
  useEffect(() => {
    if (round === 0) return; // the first page is being loaded
    list.toFirst();
    list.reload();
  }, [round]);
  const reload = () => [list, traffic, residency].forEach((one) => one.reload());
  const columns = [
    { name: "Adapter", cell: (one) => html`<a href=${link("adapters", one.name)}>${one.name}</a>
      ${one.pinned && html` <span class="tag">pinned</span>`}` },
    { name: "Version", isNumber: true, cell: (one) => one.version },
    { name: "Aliases", cell: (one) => html`<${Aliases} name=${one.name} key=${`${one.name} ${round}`} />` },
    { name: "Rank", isNumber: true, cell: (one) => one.rank },
    { name: "Size", isNumber: true, cell: (one) => formatBytes(one.bytes) },
    ...residency.value ? [{ name: "Page pool", cell: residency.value.of }] : [],
    ...traffic.value ? [
      { name: "Requests today", isNumber: true, cell: (one) => formatCount(traffic.value.of(one.name).requests) },
      { name: "Tokens today", isNumber: true, cell: (one) => formatCount(traffic.value.of(one.name).tokens) },
    ] : [],
    { name: "Newest version", cell: (one) => formatTime(one.updated) },
  ];
  return html`
    <${Panel} title="Adapters" wide actions=${html`<button onClick=${reload}>Refresh</button>`}>
      <${ErrorNotice} error=${list.error} />
      <${ErrorNotice} error=${traffic.error} />
      ${list.value === null
        ? !list.error && html`<p class="note">Loading …</p>`
        : html`
          <${Table} caption="Adapters" columns=${columns} rows=${list.value.data} rowKey=${(one) => one.name}
            empty="There are no adapters yet. Upload the first one below." />
          <${Pager} ...${list.pager} />`}
    </${Panel}>`;
}

// The aliases of a row, except one that only says what the bare name serves.
function Aliases({ name }) {
  const { value } = useLoad((signal) => call(`v1/adapters/${encodeURIComponent(name)}/aliases`, { signal }));
  if (value === null) return html`<span class="note">…</span>`;
  const shown = value.data.filter((one) => one.alias !== "latest" || Object.keys(one.versions).length > 1);
  return html`<ul class="plain">${shown.map((one) => html`
    <li key=${one.alias}>${one.alias} <${Targets} versions=${one.versions} /></li>`)}</ul>`;
}
