// What the key's tenant has used, and its quotas.

import { call } from "../api.js";
import { QuotaMeters } from "./quota.js";
import { UsagePanel } from "./usage_panel.js";
import { ErrorNotice, Panel, useLoad } from "../ui.js";
import { html } from "../vendor/preact.js";

export function View() {
  const quotas = useLoad(async (signal) => (await call("v1/quotas", { signal })).data);
  return html`
    <${ErrorNotice} error=${quotas.error} />
    <div class="panels halves">
      ${quotas.value?.map((quota) => html`
        <${Panel} key=${quota.key_id} title=${quota.key_id === null ? "Quota of the tenant" : "Quota of this key"}
          actions=${quota.key_id === null && html`<button onClick=${quotas.reload}>Refresh</button>`}>
          <${QuotaMeters} quota=${quota} />
        </${Panel}>`)}
      <${UsagePanel} route="v1/usage" />
    </div>`;
}
