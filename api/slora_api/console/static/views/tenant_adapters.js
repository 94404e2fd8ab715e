// All adapters of a tenant, for an operator: those without traffic, too. The operator may upload for the tenant.

import { call } from "../api.js";
import { path } from "../address.js";
import { Upload } from "./upload.js";
import { Pager, usePages } from "../pages.js";
import { ErrorNotice, Notice, Panel, Table, formatBytes, formatTime, useAction } from "../ui.js";
import { html, useState } from "../vendor/preact.js";

const PAGE = 25;

export function TenantAdapters({ tenant }) {
  const route = path`admin/tenants/${tenant}/adapters`;
  const list = usePages(route, PAGE);
  const [done, setDone] = useState(null);
  const [isUploading, setUploading] = useState(false);
  const { run, isBusy, error } = useAction();

  async function pin(name, method) {
    setDone(null);
    await run(async () => {
      await call(`${route}/${encodeURIComponent(name)}/pin`, { method });
      setDone(method === "PUT" ? `${name} is pinned.` : `${name} is not pinned any more.`);
      list.reload();
    });
  }

  const columns = [
    { name: "Adapter", cell: (one) => html`${one.name} ${one.pinned && html`<span class="tag">pinned</span>`}` },
    { name: "Version", isNumber: true, cell: (one) => one.version },
    { name: "Rank", isNumber: true, cell: (one) => one.rank },
    { name: "Size", isNumber: true, cell: (one) => formatBytes(one.bytes) },
    { name: "Pushed", cell: (one) => formatTime(one.updated) },
    { name: "Digest", cell: (one) => html`<code title=${one.digest}>${one.digest.slice(0, 12)}</code>` },
    { name: "Actions", cell: (one) => html`<button aria-disabled=${isBusy}
      aria-label=${`${one.pinned ? "Unpin" : "Pin"} ${one.name}`}
      onClick=${() => pin(one.name, one.pinned ? "DELETE" : "PUT")}>${one.pinned ? "Unpin" : "Pin"}</button>` },
  ];
  return html`
    <${Panel} title="Adapters of the tenant" wide actions=${!isUploading
        && html`<button onClick=${() => setUploading(true)}>Upload an adapter</button>`}>
      <${ErrorNotice} error=${error ?? list.error} />
      <div aria-live="polite">${done && html`<${Notice} kind="good">${done}</${Notice}>`}</div>
      ${list.value && html`
        <${Table} caption="Adapters of the tenant" columns=${columns} rows=${list.value.data} rowKey=${(one) => one.name}
          empty="This tenant has no adapters." />
        <${Pager} ...${list.pager} />`}
    </${Panel}>
    ${isUploading && html`<${Upload} route=${route} mayUseHub hasPages=${false} onUploaded=${list.reload} />`}`;
}
