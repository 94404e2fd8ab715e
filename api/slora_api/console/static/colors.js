// Colours of tenants. A tenant keeps its colour for as long as the page is open.

const NUM_COLORS = 12;
const numbers = new Map();

// The name of the CSS variable with the tenant's colour. The tenants after the first twelve share one.
export function colorOf(tenant) {
  if (tenant === null) return "--c-other";
  if (!numbers.has(tenant)) numbers.set(tenant, numbers.size);
  const number = numbers.get(tenant);
  return number < NUM_COLORS ? `--c${number}` : "--c-many";
}

export const cssColor = (variable) => `var(${variable})`;
