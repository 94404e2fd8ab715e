// The audit log, newest first.

import { Pager, usePages } from "../pages.js";
import { ErrorNotice, Panel, Table } from "../ui.js";
import { html, useState } from "../vendor/preact.js";

const PAGE = 50;
const FILTERS = [
  { field: "tenant", title: "Tenant" },
  { field: "action", title: "Action", placeholder: "key, or key.revoke" },
  { field: "actor", title: "Actor", placeholder: "id of a key" },
];

export function View() {
  const [filter, setFilter] = useState({});
  const log = usePages(`admin/audit?${new URLSearchParams(filter)}`, PAGE);
  function submit(event) {
    event.preventDefault();
    const form = new FormData(event.target);
    setFilter(Object.fromEntries([...form].map(([field, text]) => [field, text.trim()]).filter(([, text]) => text !== "")));
    log.toFirst();
    log.reload();
  }
  const columns = [
    { name: "Time", cell: (one) => new Date(one.created * 1000).toLocaleString(undefined,
      { dateStyle: "medium", timeStyle: "medium" }) },
    { name: "Action", cell: (one) => html`<code>${one.action}</code>` },
    { name: "Tenant", cell: (one) => one.tenant },
    { name: "Target", cell: (one) => one.target },
    { name: "Actor", cell: (one) => html`${one.actor_kind} ${one.actor && html`<code>${one.actor}</code>`}
      ${one.address && html`<br /><small>${one.address}</small>`}` },
    { name: "Details", cell: (one) => html`<${Details} entry=${one} />` },
  ];
  return html`
    <${Panel} title="Changes, newest first" wide>
      <form class="fields" onSubmit=${submit}>
        ${FILTERS.map(({ field, title, placeholder }) => html`
          <label key=${field}>${title} <input name=${field} placeholder=${placeholder} autocomplete="off" spellcheck=${false} />
          </label>`)}
        <button>Show</button>
      </form>
      <${ErrorNotice} error=${log.error} />
      ${log.value && html`
        <${Table} caption="Audit log" columns=${columns} rows=${log.value.data} rowKey=${(one) => one.id}
          empty="No change matches." />
        <${Pager} ...${log.pager} back="Newer" next="Older" />`}
    </${Panel}>`;
}

const Details = ({ entry }) => {
  const text = JSON.stringify(entry.details, null, 1);
  if (text === "{}" && !entry.request_id) return "–";
  return html`<details><summary>Show</summary><pre>${text}</pre>
    ${entry.request_id && html`<small>Request ${entry.request_id}</small>`}</details>`;
};
