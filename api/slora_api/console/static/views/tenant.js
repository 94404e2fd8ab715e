// One tenant, for operators: quota, share, keys and usage; suspend, resume, rename and purge.

import { call } from "../api.js";
import { link, path } from "../address.js";
import { Confirm, FormDialog } from "../dialog.js";
import { Keys } from "./keys.js";
import { QuotaForm, QuotaMeters } from "./quota.js";
import { ShareFields, readShare } from "./share.js";
import { TenantAdapters } from "./tenant_adapters.js";
import { UsagePanel } from "./usage_panel.js";
import { ErrorNotice, Figure, Notice, Panel, formatBytes, formatCount, formatShare, formatTime, useLoad } from "../ui.js";
import { html, useEffect, useRef, useState } from "../vendor/preact.js";

export function Tenant({ name }) {
  const route = path`admin/tenants/${name}`;
  const tenant = useLoad((signal) => call(route, { signal }));
  const quota = useLoad((signal) => call(`${route}/quota`, { signal }));
  const [window, setWindow] = useState(null);
  const [done, setDone] = useState(null);
  // What a purge has deleted. The tenant does not exist any more.
  const [purged, setPurged] = useState(null);
  const heading = useRef(null);
  useEffect(() => heading.current?.focus(), []);
  const close = () => setWindow(null);
  const finish = (what) => {
    setDone(what);
    tenant.reload();
    quota.reload();
  };

  const setShare = () => setWindow(html`
    <${FormDialog} title=${`Share of ${name}`} verb="Set the share" onClose=${close} send=${async (form) => {
      await call(route, { method: "PATCH", body: readShare(form) });
      finish("The share was set. It takes effect with the next request.");
    }}><${ShareFields} tenant=${tenant.value} /></${FormDialog}>`);
  const setQuota = () => setWindow(html`
    <${QuotaForm} quota=${quota.value} route=${`${route}/quota`} title=${`Quota of ${name}`} onClose=${close}
      onChanged=${() => finish("The quota was set.")} />`);
  const suspend = () => setWindow(html`
    <${Confirm} title="Suspend the tenant" verb="Suspend" onClose=${close} act=${async () => {
      await call(`${route}/suspend`, { method: "POST" });
      finish("The tenant is suspended.");
    }}><p>Requests and uploads of <strong class="name">${name}</strong> are refused, those in progress end, and its pins are
      released. Nothing is deleted.</p></${Confirm}>`);
  const resume = () => setWindow(html`
    <${Confirm} title="Resume the tenant" verb="Resume" onClose=${close} act=${async () => {
      await call(`${route}/resume`, { method: "POST" });
      finish("The tenant is served again.");
    }}><p><strong class="name">${name}</strong> is served as before.</p></${Confirm}>`);
  const rename = () => setWindow(html`
    <${FormDialog} title="Rename the tenant" verb="Rename" onClose=${close} send=${async (form) => {
      const renamed = await call(route, { method: "PATCH", body: { name: form.get("name").trim() } });
      location.hash = link("tenants", renamed.name);
    }}><label>New name <input name="name" defaultValue=${name} required maxlength="128" autocomplete="off"
      spellcheck=${false} /></label></${FormDialog}>`);
  const purge = () => setWindow(html`<${Purge} name=${name} route=${route} onClose=${close} onPurged=${setPurged} />`);

  const status = tenant.value?.status;
  const title = html`
    <p class="path"><a href=${link("tenants")}>All tenants</a></p>
    <div class="title">
      <h2 class="name" tabindex="-1" ref=${heading}>${name}</h2>
      ${status && !purged && html`<span class=${`tag ${status}`}>${status}</span>`}
    </div>`;
  if (purged) return html`${title}<${Purged} report=${purged} />`;
  return html`
    ${title}
    <div aria-live="polite">${done && html`<${Notice} kind="good">${done}</${Notice}>`}</div>
    <${ErrorNotice} error=${tenant.error ?? quota.error} />
    ${tenant.value && html`
      <div class="panels halves">
        <${Panel} title="Share of the engine" actions=${html`<button onClick=${setShare}>Change the share</button>`}>
          <dl class="figures">
            <${Figure} name="Weight" value=${tenant.value.weight} />
            <${Figure} name="Share of the pool"
              value=${`${formatShare(tenant.value.min_pool_share)} to ${formatShare(tenant.value.max_pool_share)}`} />
            <${Figure} name="Priority" value=${tenant.value.priority} />
            <${Figure} name="Created" value=${formatTime(tenant.value.created)} />
          </dl>
        </${Panel}>
        <${Panel} title="Quota" actions=${quota.value && html`<button onClick=${setQuota}>Change the quota</button>`}>
          ${quota.value && html`<${QuotaMeters} quota=${quota.value} />`}
        </${Panel}>
        <${Keys} tenant=${name} />
        <${TenantAdapters} tenant=${name} key=${name} />
        <${UsagePanel} route=${`admin/usage?tenant=${encodeURIComponent(name)}`} />
        <${Panel} title="Life of the tenant" wide>
          <span class="row-actions">
            ${status === "active" && html`<button onClick=${suspend}>Suspend</button>`}
            ${status === "suspended" && html`<button onClick=${resume}>Resume</button>`}
            ${status !== "purging" && html`<button onClick=${rename}>Rename</button>`}
            <button class="danger" onClick=${purge}>Purge</button>
          </span>
        </${Panel}>
      </div>`}
    ${window}`;
}

function Purge({ name, route, onClose, onPurged }) {
  const [ledger, setLedger] = useState("keep");
  return html`
    <${Confirm} title="Purge the tenant" verb="Purge" typed=${name} onClose=${onClose}
      act=${async () => onPurged(await call(`${route}/purge`, { method: "POST", body: { confirm: name, ledger } }))}>
      <p>Keys, adapters, files, batches and settings of <strong class="name">${name}</strong> are deleted, and its requests
        end. Only a backup brings the tenant back.</p>
      <label>Usage
        <select value=${ledger} onChange=${(event) => setLedger(event.target.value)}>
          <option value="keep">Keep it for invoices</option>
          <option value="erase">Erase it, too</option>
        </select></label>
    </${Confirm}>`;
}

const Purged = ({ report }) => html`
  <${Notice} kind="good">The tenant was purged.</${Notice}>
  <${Panel} title="What was deleted">
    <dl class="figures">
      <${Figure} name="Keys" value=${formatCount(report.keys)} />
      <${Figure} name="Adapters" value=${formatCount(report.adapters)} />
      <${Figure} name="Versions" value=${formatCount(report.versions)} />
      <${Figure} name="Stored weights" value=${formatCount(report.blobs)} unit=${formatBytes(report.blob_bytes)} />
      <${Figure} name="Kept, because others need them" value=${formatCount(report.blobs_kept)} />
      <${Figure} name="Requests ended" value=${formatCount(report.requests)} />
      <${Figure} name="Pages overwritten" value=${formatCount(report.pool_pages)} unit=${formatBytes(report.pool_bytes)} />
      <${Figure} name="Usage records erased"
        value=${report.usage_records === null ? "none: kept" : formatCount(report.usage_records)} />
    </dl>
  </${Panel}>`;
