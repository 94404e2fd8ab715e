// The fields of a tenant's share of the engine.

import { formatShare } from "../ui.js";
import { html } from "../vendor/preact.js";

const FIELDS = [
  { field: "weight", title: "Weight", initial: 1, note: "service relative to other tenants" },
  { field: "min_pool_share", title: "Least share of the pool", initial: 0, note: "0 to 1, kept once the tenant holds it" },
  { field: "max_pool_share", title: "Greatest share of the pool", initial: 1, note: "0 to 1, never exceeded" },
  { field: "priority", title: "Priority", initial: 0, note: "a lower number goes first" },
];

// tenant: the tenant whose share is shown, or undefined for a new one.
export const ShareFields = ({ tenant }) => html`
  <div class="field-grid">
    ${FIELDS.map(({ field, title, initial, note }) => html`
      <label key=${field}>${title} <small>${note}</small>
        <input name=${field} type="number" step="any" required defaultValue=${tenant?.[field] ?? initial} /></label>`)}
  </div>`;

export const readShare = (form) => Object.fromEntries(FIELDS.map(({ field }) => [field, Number(form.get(field))]));

// What differs from the share of a new tenant, or null.
export function describeShare(tenant) {
  const differs = Object.fromEntries(FIELDS.map(({ field, initial }) => [field, tenant[field] !== initial]));
  const parts = [
    differs.weight && `weight ${tenant.weight}`,
    (differs.min_pool_share || differs.max_pool_share)
      && `${formatShare(tenant.min_pool_share)} to ${formatShare(tenant.max_pool_share)} of the pool`,
    differs.priority && `priority ${tenant.priority}`,
  ];
  return parts.filter(Boolean).join(", ") || null;
}
