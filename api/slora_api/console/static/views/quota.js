// The quota of a tenant or of a key, with what is used of it, and the form that changes it.

import { call } from "../api.js";
import { FormDialog } from "../dialog.js";
import { formatBytes, formatCount } from "../ui.js";
import { html } from "../vendor/preact.js";

// A key has no quota of adapters, because they belong to its tenant.
const LIMITS = [
  { field: "requests_per_minute", title: "Requests in 60 s" },
  { field: "tokens_per_minute", title: "Tokens in 60 s" },
  { field: "tokens_per_day", title: "Tokens today" },
  { field: "tokens_per_month", title: "Tokens this month" },
  { field: "concurrent_answers", title: "Answers in progress" },
  { field: "composed_adapters", title: "Adapters combined in a request" },
  { field: "adapter_versions", title: "Adapter versions", isOfTenant: true },
  { field: "stored_bytes", title: "Stored adapters", isOfTenant: true, format: formatBytes },
];

const limitsOf = (quota) => LIMITS.filter((one) => quota.key_id === null || !one.isOfTenant);

// What is used of each limit. A limit of single requests has no use.
export const QuotaMeters = ({ quota }) => html`
  <dl class="meters">
    ${limitsOf(quota).map(({ field, title, format = formatCount }) => {
      const [used, limit] = [quota.used[field], quota.limits[field]];
      return html`
        <div key=${field}>
          <dt>${title}</dt>
          <dd>${used !== undefined && format(used)}
            <small> ${limit === null ? "no limit" : `${used === undefined ? "at most" : "of"} ${format(limit)}`}</small>
            ${limit !== null && used !== undefined && html`<meter min="0" max=${Math.max(limit, 1)} high=${limit * 0.9} optimum="0" value=${used}
              aria-label=${title} />`}</dd>
        </div>`;
    })}
  </dl>`;

// The greatest part of a limit that is used, from 0 to 1, with the limit's title. Null if there is no limit.
export function fullest(quota) {
  const parts = limitsOf(quota)
    .filter(({ field }) => quota.limits[field] !== null && quota.used[field] !== undefined)
    .map(({ field, title }) => ({ title, part: quota.used[field] / Math.max(quota.limits[field], 1) }));
  return parts.sort((one, other) => other.part - one.part)[0] ?? null;
}

// route: the operator's route of the quota. An empty field removes the limit.
export function QuotaForm({ quota, route, title, onClose, onChanged }) {
  async function send(form) {
    const body = {};
    for (const { field } of limitsOf(quota)) {
      const text = form.get(field).trim();
      const limit = text === "" ? null : Number(text);
      if (limit !== quota.limits[field]) body[field] = limit;
    }
    onChanged(await call(route, { method: "PATCH", body }));
  }
  return html`
    <${FormDialog} title=${title} verb="Set the quota" send=${send} onClose=${onClose}>
      <p class="note">An empty field means that there is no limit. A change applies within a second.</p>
      <div class="field-grid">
        ${limitsOf(quota).map((one) => html`
          <label key=${one.field}>${one.title}${one.format ? " (bytes)" : ""}
            <input type="number" name=${one.field} min="0" step="1" defaultValue=${quota.limits[one.field] ?? ""} /></label>`)}
      </div>
    </${FormDialog}>`;
}
