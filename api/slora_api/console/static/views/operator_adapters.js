// The adapters of all tenants, for an operator: all of them, what was used today, and what is pinned.

import { call } from "../api.js";
import { link, path } from "../address.js";
import { Targets } from "./adapter.js";
import { loadToday } from "../usage.js";
import { Pager, usePages } from "../pages.js";
import { ErrorNotice, Notice, Panel, Table, formatBytes, formatCount, formatNumber, formatTime, useAction, useLoad } from "../ui.js";
import { html, useState } from "../vendor/preact.js";

const MOST_USED = 100;
const SUGGESTED = 20;
const PAGE = 25;
const FOUND_PAGE = 15;

// Loads the adapters used today: those with the most requests, and the number of all. The usage of a purged tenant stays,
// and its page does not exist, so `isPurged` marks its adapters.
async function loadUsed(signal) {
  const all = (await loadToday("admin/usage", "tenant,model", signal)).filter((one) => one.adapter_digest !== null);
  const shown = all.sort((one, other) => other.num_model_requests - one.num_model_requests).slice(0, MOST_USED);
  const names = new Set(shown.filter((one) => one.model === null).map((one) => one.tenant));
  const query = new URLSearchParams([...names].map((name) => ["name", name]));
  const existing = names.size === 0 ? [] : (await call(`admin/tenants?${query}`, { signal })).data;
  for (const { name } of existing) names.delete(name);
  return { shown: shown.map((one) => ({ ...one, isPurged: names.has(one.tenant) })), total: all.length };
}

const showTenant = (one) => (one.isPurged
  ? html`${one.tenant} <span class="note">purged</span>`
  : html`<a href=${link("tenants", one.tenant)}>${one.tenant}</a>`);

// The adapters of all tenants, by a part of their name or of their tenant's name.
function Search() {
  const [wanted, setWanted] = useState("");
  const list = usePages(`admin/adapters?${new URLSearchParams(wanted.trim() && { contains: wanted.trim() })}`, FOUND_PAGE);
  const columns = [
    { name: "Tenant", cell: showTenant },
    { name: "Adapter", cell: (one) => html`${one.name} ${one.pinned && html`<span class="tag">pinned</span>`}` },
    { name: "Version", isNumber: true, cell: (one) => one.version },
    { name: "Rank", isNumber: true, cell: (one) => one.rank },
    { name: "Size", isNumber: true, cell: (one) => formatBytes(one.bytes) },
    { name: "Pushed", cell: (one) => formatTime(one.updated) },
  ];
  return html`
    <${Panel} title="All adapters" wide actions=${html`
        <input type="search" aria-label="Find an adapter" placeholder="Name of the adapter or tenant" maxlength="128"
          value=${wanted} onInput=${(event) => setWanted(event.target.value)} />`}>
      <${ErrorNotice} error=${list.error} />
      ${list.value && html`
        <${Table} caption="All adapters" rows=${list.value.data} rowKey=${(one) => one.id} columns=${columns}
          empty=${wanted ? `No adapter or tenant has "${wanted}" in its name.` : "There are no adapters yet."} />
        <${Pager} ...${list.pager} />`}
      <p class="note">The page of a tenant uploads and pins its adapters. Sign in with a tenant's key to move aliases and roll
        back.</p>
    </${Panel}>`;
}

export function OperatorAdapters() {
  const pins = usePages("admin/pins", PAGE);
  const used = useLoad(loadUsed);
  const [owner, setOwner] = useState("");
  const suggested = useLoad(async (signal) => (await call(
    `admin/tenants?${new URLSearchParams({ contains: owner.trim(), limit: SUGGESTED })}`, { signal })).data, [owner.trim()]);
  const [done, setDone] = useState(null);
  const { run, isBusy, error } = useAction();

  async function pin(tenant, name, method) {
    setDone(null);
    await run(async () => {
      await call(path`admin/tenants/${tenant}/adapters/${name}/pin`, { method });
      setDone(method === "PUT" ? `${name} of ${tenant} is pinned.` : `${name} of ${tenant} is not pinned any more.`);
      pins.reload();
    });
  }
  async function submit(event) {
    event.preventDefault();
    const { tenant, adapter } = event.target.elements;
    await pin(tenant.value.trim(), adapter.value.trim(), "PUT");
  }

  // The alias latest is what the bare name serves.
  const referenceOf = (one) => (one.alias === "latest" ? one.name : `${one.name}@${one.alias}`);
  const pinColumns = [
    { name: "Tenant", cell: showTenant },
    { name: "Adapter", cell: referenceOf },
    { name: "Versions", cell: (one) => html`<${Targets} versions=${one.versions} />` },
    { name: "Actions", cell: (one) => html`<button aria-disabled=${isBusy} aria-label=${`Unpin ${one.name} of ${one.tenant}`}
      onClick=${() => pin(one.tenant, referenceOf(one), "DELETE")}>Unpin</button>` },
  ];
  const usedColumns = [
    { name: "Tenant", cell: showTenant },
    { name: "Adapter", cell: (one) => one.model ?? html`<span class="note">deleted${" "}</span>
      <code title=${one.adapter_digest}>${one.adapter_digest.slice(0, 12)}</code>` },
    { name: "Requests", isNumber: true, cell: (one) => formatCount(one.num_model_requests) },
    { name: "Tokens in", isNumber: true, cell: (one) => formatCount(one.input_tokens) },
    { name: "Tokens out", isNumber: true, cell: (one) => formatCount(one.output_tokens) },
    { name: "Loaded", isNumber: true, cell: (one) => formatBytes(one.adapter_bytes) },
    { name: "Page seconds", isNumber: true, cell: (one) => formatNumber(one.page_seconds) },
    { name: "Actions", cell: (one) => one.model && !one.model.includes("+") && html`
      <button aria-disabled=${isBusy} aria-label=${`Pin ${one.model} of ${one.tenant}`}
        onClick=${() => pin(one.tenant, one.model.split("@")[0], "PUT")}>Pin</button>` },
  ];
  return html`
    <${ErrorNotice} error=${error} />
    <div aria-live="polite">${done && html`<${Notice} kind="good">${done}</${Notice}>`}</div>
    <div class="panels">
      <${Panel} title="Adapters used today (UTC)" wide
        actions=${html`<button onClick=${() => [pins, used].forEach((one) => one.reload())}>Refresh</button>`}>
        <${ErrorNotice} error=${used.error} />
        ${used.value && html`<${Table} caption="Adapters used today" columns=${usedColumns}
          rows=${used.value.shown} rowKey=${(one) => `${one.tenant} ${one.adapter_digest}`}
          empty="No adapter was used today." />`}
        ${used.value?.total > MOST_USED && html`<p class="note">The ${MOST_USED} with the most
          requests of ${formatCount(used.value.total)}.</p>`}
      </${Panel}>
      <${Search} />
      <${Panel} title="Pinned adapters" wide>
        <p class="note">A pinned adapter is loaded before it is needed, and is evicted only if a request could not run
          otherwise.</p>
        <${ErrorNotice} error=${pins.error} />
        ${pins.value && html`<${Table} caption="Pinned adapters" columns=${pinColumns} rows=${pins.value.data}
          rowKey=${(one) => one.id} empty="No adapter is pinned." />
          <${Pager} ...${pins.pager} />`}
        <form class="fields" onSubmit=${submit}>
          <label>Tenant <input name="tenant" list="tenants" required maxlength="128" value=${owner}
            onInput=${(event) => setOwner(event.target.value)} autocomplete="off" spellcheck=${false} /></label>
          <datalist id="tenants">${suggested.value?.map((one) => html`<option key=${one.name} value=${one.name}></option>`)}
          </datalist>
          <label>Adapter <input name="adapter" placeholder="adapter or adapter@alias" required autocomplete="off" spellcheck=${false} /></label>
          <button aria-disabled=${isBusy}>Pin</button>
        </form>
      </${Panel}>
    </div>`;
}
