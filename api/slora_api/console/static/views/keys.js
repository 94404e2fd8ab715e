// The keys of a tenant, for an operator: create, rotate, revoke, set the quota.

import { call } from "../api.js";
import { path } from "../address.js";
import { CopyButton } from "../copy.js";
import { Buttons, Confirm, Dialog, FormDialog } from "../dialog.js";
import { QuotaForm } from "./quota.js";
import { Pager, usePages } from "../pages.js";
import { ErrorNotice, Panel, Table, formatTime, useLoad } from "../ui.js";
import { html, useState } from "../vendor/preact.js";

const SCOPES = ["inference", "adapters:read", "adapters:write", "usage:read"];
// Scopes that a new key has only if they are chosen.
const FURTHER_SCOPES = ["adapters:hub"];
const PAGE = 25;
const DAY_S = 86_400;

export function Keys({ tenant }) {
  const keys = usePages(path`admin/tenants/${tenant}/keys`, PAGE);
  const [window, setWindow] = useState(null);
  const close = () => setWindow(null);
  // The form closes itself after this, so the secret is shown in the next task.
  const showSecret = (made) => setTimeout(() => setWindow(html`<${Secret} made=${made} onClose=${close} />`));
  const nameOf = (key) => key.name || key.key_id;

  function showQuota(key) {
    const route = path`admin/keys/${key.key_id}/quota`;
    setWindow(html`<${KeyQuota} route=${route} title=${`Quota of the key ${nameOf(key)}`} onClose=${close} />`);
  }
  const columns = [
    { name: "Key", cell: (one) => html`<code>${one.key_id}</code> ${one.name}` },
    { name: "State", cell: (one) => html`<span class="tag">${stateOf(one)}</span>` },
    { name: "Scopes", cell: (one) => html`<span class="note">${one.scopes.join(", ")}</span>` },
    { name: "Models", cell: (one) => html`<span class="note">${one.models ? one.models.join(", ") : "all"}
      ${one.adapter && html`<br />default: ${one.adapter}`}</span>` },
    { name: "Created", cell: (one) => formatTime(one.created) },
    { name: "Last used", cell: (one) => formatTime(one.last_used_at) },
    { name: "Expires", cell: (one) => (one.expires_at === null ? "never" : formatTime(one.expires_at)) },
    { name: "Actions", cell: (one) => !one.revoked && html`<span class="row-actions">
      <button onClick=${() => showQuota(one)} aria-label=${`Quota of the key ${nameOf(one)}`}>Quota</button>
      ${one.replaced_by === null && html`<button aria-label=${`Rotate the key ${nameOf(one)}`} onClick=${() => setWindow(html`
        <${Rotation} keyObject=${one} onClose=${close} onMade=${(made) => { keys.reload(); showSecret(made); }} />`)}>
        Rotate</button>`}
      <button class="danger" aria-label=${`Revoke the key ${nameOf(one)}`} onClick=${() => setWindow(html`
        <${Confirm} title="Revoke the key" verb="Revoke" onClose=${close}
          act=${async () => { await call(path`admin/keys/${one.key_id}`, { method: "DELETE" }); keys.reload(); }}>
          <p>The key <code>${one.key_id}</code> <strong class="name">${one.name}</strong> is refused at once, and its requests
            in progress end within a second. A revoked key stays revoked.</p>
        </${Confirm}>`)}>Revoke</button></span>` },
  ];
  return html`
    <${Panel} title="Keys" wide actions=${html`<button onClick=${() => setWindow(html`
        <${NewKey} tenant=${tenant} onClose=${close} onMade=${(made) => { keys.reload(); showSecret(made); }} />`)}>
        New key</button>`}>
      <${ErrorNotice} error=${keys.error} />
      ${keys.value && html`<${Table} caption="Keys" columns=${columns} rows=${keys.value.data} rowKey=${(one) => one.key_id}
          empty="This tenant has no keys." />
        <${Pager} ...${keys.pager} />`}
      ${window}
    </${Panel}>`;
}

function stateOf(key) {
  if (key.revoked) return "revoked";
  if (key.expires_at !== null && key.expires_at * 1000 <= Date.now()) return "expired";
  return key.replaced_by === null ? "valid" : "replaced";
}

function NewKey({ tenant, onClose, onMade }) {
  async function send(form) {
    const body = { scopes: form.getAll("scopes") };
    if (form.get("name")) body.name = form.get("name");
    if (form.get("adapter")) body.adapter = form.get("adapter").trim();
    const models = form.get("models").split(/[\s,]+/).filter((one) => one !== "");
    if (models.length > 0) body.models = models;
    if (form.get("days")) body.expires_at = Math.floor(Date.now() / 1000 + Number(form.get("days")) * DAY_S);
    onMade(await call(path`admin/tenants/${tenant}/keys`, { method: "POST", body }));
  }
  return html`
    <${FormDialog} title=${`New key of ${tenant}`} verb="Create" send=${send} onClose=${onClose}>
      <label>Name <input name="name" autocomplete="off" placeholder="what it is for" /></label>
      <fieldset><legend>Scopes</legend>
        ${[...SCOPES, ...FURTHER_SCOPES].map((scope) => html`<label class="check" key=${scope}>
          <input type="checkbox" name="scopes" value=${scope} defaultChecked=${SCOPES.includes(scope)} />
          <code>${scope}</code></label>`)}
      </fieldset>
      <label>Default adapter <input name="adapter" autocomplete="off" spellcheck=${false}
        placeholder="none: the base model" /></label>
      <label>Allowed models <input name="models" autocomplete="off" spellcheck=${false}
        placeholder="all; or names, separated by commas" /></label>
      <label>Days until it expires <input name="days" type="number" min="0" step="any" placeholder="never" /></label>
    </${FormDialog}>`;
}

function Rotation({ keyObject, onClose, onMade }) {
  const send = async (form) => onMade(await call(path`admin/keys/${keyObject.key_id}/rotate`,
    { method: "POST", body: { overlap_seconds: Math.round(Number(form.get("days")) * DAY_S) } }));
  return html`
    <${FormDialog} title="Rotate the key" verb="Rotate" send=${send} onClose=${onClose}>
      <p>A new key with the same permissions replaces <code>${keyObject.key_id}</code>
        <strong class="name">${keyObject.name}</strong>, which stays valid for a while.</p>
      <label>Days for which the old key stays valid
        <input name="days" type="number" min="0" max="30" step="any" defaultValue="1" required /></label>
    </${FormDialog}>`;
}

// Shows the secret of a new key, which the server shows only once.
const Secret = ({ made, onClose }) => html`
  <${Dialog} title="The new key" onClose=${onClose}>
    <p>Copy the key now. The server does not show it again.</p>
    <p><code class="secret">${made.key}</code></p>
    <${Buttons}>
      <${CopyButton} text=${made.key} label="Copy the key" />
      <button class="primary" onClick=${onClose}>Done</button>
    </${Buttons}>
  </${Dialog}>`;

function KeyQuota({ route, title, onClose }) {
  const quota = useLoad((signal) => call(route, { signal }));
  if (quota.value === null) {
    return html`<${Dialog} title=${title} onClose=${onClose}>
      ${quota.error ? html`<${ErrorNotice} error=${quota.error} />` : html`<p class="note">Loading …</p>`}
      <${Buttons}><button onClick=${onClose}>Close</button></${Buttons}></${Dialog}>`;
  }
  return html`<${QuotaForm} quota=${quota.value} route=${route} title=${title} onClose=${onClose} onChanged=${() => {}} />`;
}
