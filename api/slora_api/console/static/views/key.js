// The key of the session: what it may do.

import { Figure, Panel, formatTime } from "../ui.js";
import { html } from "../vendor/preact.js";

const MEANINGS = {
  "inference": "send requests to models",
  "adapters:read": "list adapters and their versions",
  "adapters:write": "upload, roll out and delete adapters",
  "adapters:hub": "let the server download adapters from the Hugging Face hub",
  "usage:read": "read the tenant's usage, and watch its part of the pool",
  "admin": "operate the server: tenants, keys, quotas, metrics and the audit log",
};

export const View = ({ me }) => html`
  <div class="panels">
    <${Panel} title=${me.tenant === null ? "Operator's key" : "API key"}>
      <dl class="figures">
        ${me.tenant !== null && html`<${Figure} name="Tenant" value=${me.tenant} />`}
        <${Figure} name="Key id" value=${me.key_id} />
        ${me.name && html`<${Figure} name="Name" value=${me.name} />`}
        ${me.tenant !== null && html`<${Figure} name="Default adapter" value=${me.adapter ?? "none: the base model"} />`}
        <${Figure} name="Expires" value=${me.expires_at === null ? "never" : formatTime(me.expires_at)} />
      </dl>
    </${Panel}>
    <${Panel} title="What this key may do">
      <ul class="plain">
        ${me.scopes.map((scope) => html`<li key=${scope}><code>${scope}</code> ${MEANINGS[scope] ?? ""}</li>`)}
      </ul>
      ${me.models && html`<p>It may use only these models: ${me.models.map((name) => html`<code>${name}</code> `)}</p>`}
    </${Panel}>
  </div>`;
