// The tenants of the server, for operators.

import { call } from "../api.js";
import { link, path, useSubject } from "../address.js";
import { FormDialog } from "../dialog.js";
import { fullest } from "./quota.js";
import { ShareFields, describeShare, readShare } from "./share.js";
import { Tenant } from "./tenant.js";
import { Pager, usePages } from "../pages.js";
import { ErrorNotice, Panel, Table, formatCount, formatShare, useLoad } from "../ui.js";
import { addUp, loadToday } from "../usage.js";
import { html, useState } from "../vendor/preact.js";

const PAGE = 20;
const ORDERS = [
  { id: "name", title: "name" },
  { id: "requests", title: "requests today", amount: (sum) => sum?.requests ?? 0 },
  { id: "tokens", title: "tokens today", amount: (sum) => tokens(sum) },
];

export function View() {
  const name = useSubject();
  return name === null ? html`<${Tenants} />` : html`<${Tenant} name=${name} key=${name} />`;
}

function Tenants() {
  const usage = useLoad(async (signal) => addUp(await loadToday("admin/usage", "tenant", signal), (one) => one.tenant));
  const [wanted, setWanted] = useState("");
  const [orderId, setOrderId] = useState("name");
  const [window, setWindow] = useState(null);
  const { amount } = ORDERS.find((one) => one.id === orderId);
  const byName = usePages(`admin/tenants?${new URLSearchParams(wanted.trim() && { contains: wanted.trim() })}`, PAGE);
  const byUse = useBusiest(usage.value, amount, wanted.trim());
  const list = amount ? byUse : byName;
  const columns = [
    { name: "Tenant", cell: (one) => html`<a href=${link("tenants", one.name)}>${one.name}</a>` },
    { name: "State", cell: (one) => html`<span class=${`tag ${one.status}`}>${one.status}</span>` },
    { name: "Requests today", isNumber: true, cell: (one) => formatCount(usage.value?.get(one.name)?.requests ?? 0) },
    { name: "Tokens today", isNumber: true, cell: (one) => formatCount(tokens(usage.value?.get(one.name))) },
    { name: "Fullest quota", cell: (one) => html`<${Fullest} tenant=${one.name} key=${one.name} />` },
    { name: "Share", cell: (one) => describeShare(one) ?? html`<span class="note">default</span>` },
  ];
  const reload = () => [list, usage].forEach((one) => one.reload());
  return html`
    <div class="panels">
      <${Panel} title="Tenants" wide actions=${html`
          <span class="row-actions">
            <input type="search" aria-label="Find a tenant" placeholder="Find a tenant" maxlength="128" value=${wanted}
              onInput=${(event) => setWanted(event.target.value)} />
            <select aria-label="Order" value=${orderId} onChange=${(event) => setOrderId(event.target.value)}>
              ${ORDERS.map((one) => html`<option key=${one.id} value=${one.id}>Sort by ${one.title}</option>`)}</select>
            <button onClick=${reload}>Refresh</button>
            <button onClick=${() => setWindow(html`<${NewTenant} onClose=${() => setWindow(null)} />`)}>New tenant</button>
          </span>`}>
        <${ErrorNotice} error=${list.error ?? usage.error} />
        ${list.value && html`
          <${Table} caption="Tenants" columns=${columns} rows=${list.value.data} rowKey=${(one) => one.name}
            empty=${wanted ? `No ${amount ? "busy " : ""}tenant has "${wanted}" in its name.`
              : amount ? "No tenant has sent a request today." : "There are no tenants yet."} />
          ${amount && html`<p class="note">Tenants without requests today are listed by name only.</p>`}
          <${Pager} ...${list.pager} />`}
      </${Panel}>
    </div>
    ${window}`;
}

// Pages of the tenants that have used something today, the busiest first. The server lists tenants by name, so this asks
// for those of a page by their names. `usage`: name -> sum, or null. `amount`: what to sort by; null loads nothing.
function useBusiest(usage, amount, wanted) {
  const [page, setPage] = useState(0);
  const names = amount && usage ? [...usage.keys()].filter((name) => name.includes(wanted.toLowerCase())) : [];
  names.sort((one, other) => amount(usage.get(other)) - amount(usage.get(one)));
  const first = Math.min(page, Math.ceil(names.length / PAGE) - 1) * PAGE;
  const shown = names.slice(Math.max(first, 0), first + PAGE);
  const query = new URLSearchParams(shown.map((name) => ["name", name]));
  const list = useLoad(async (signal) => {
    if (shown.length === 0) return { data: [] };
    const { data } = await call(`admin/tenants?${query}&limit=${PAGE}`, { signal });
    return { data: data.sort((one, other) => shown.indexOf(one.name) - shown.indexOf(other.name)) };
  }, [`${query}`]);
  const pager = {
    isFirst: first <= 0,
    hasMore: first + PAGE < names.length,
    onBack: () => setPage(first / PAGE - 1),
    onNext: () => setPage(first / PAGE + 1),
  };
  return { ...list, pager };
}

const tokens = (sum) => (sum ? sum.input + sum.output : 0);

// The limit of which a tenant has used the greatest part.
function Fullest({ tenant }) {
  const { value } = useLoad((signal) => call(path`admin/tenants/${tenant}/quota`, { signal }));
  const found = value && fullest(value);
  if (!found) return html`<span class="note">${value ? "no limits" : "…"}</span>`;
  return html`<span class="fullest"><meter min="0" max="1" high="0.9" optimum="0" value=${found.part} aria-label=${found.title} />
    ${formatShare(Math.round(found.part * 1000) / 1000)} <small>${found.title.toLowerCase()}</small></span>`;
}

function NewTenant({ onClose }) {
  const send = async (form) => {
    const made = await call("admin/tenants", { method: "POST", body: { name: form.get("name").trim(), ...readShare(form) } });
    location.hash = link("tenants", made.name);
  };
  return html`
    <${FormDialog} title="New tenant" verb="Create" send=${send} onClose=${onClose}>
      <label>Name <input name="name" required maxlength="128" autocomplete="off" spellcheck=${false} /></label>
      <${ShareFields} />
    </${FormDialog}>`;
}
