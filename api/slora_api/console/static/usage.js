// Sums of the usage ledger.

import { call } from "./api.js";

const MAX_PAGES = 5;

// Returns the buckets of the ledger, and whether there are more results than were loaded.
// route: `v1/usage`, or `admin/usage` with parameters. width: `1m`, `1h` or `1d`. limit: the number of buckets.
export async function loadUsage(route, { width, limit, groups = "" }, signal) {
  const first = `${route}${route.includes("?") ? "&" : "?"}bucket_width=${width}&limit=${limit}`
    + (groups && `&group_by=${groups}`);
  const buckets = [];
  let page = "";
  for (let count = 0; count < MAX_PAGES; count++) {
    const found = await call(first + page, { signal });
    buckets.push(...found.data);
    if (!found.next_page) return { buckets, isCut: false };
    page = `&page=${encodeURIComponent(found.next_page)}`;
  }
  return { buckets, isCut: true };
}

// Returns the results since midnight (UTC).
export async function loadToday(route, groups, signal) {
  const { buckets } = await loadUsage(route, { width: "1d", limit: 1, groups }, signal);
  return buckets.flatMap((bucket) => bucket.results);
}

// Adds results up. `keyOf(result)` names the sum to which a result belongs. Returns {key: sum}.
export function addUp(results, keyOf) {
  const sums = new Map();
  for (const one of results) {
    const key = keyOf(one);
    const sum = sums.get(key) ?? { key, requests: 0, input: 0, cached: 0, output: 0, billedInput: 0, billedOutput: 0,
      adapterBytes: 0, pageSeconds: 0 };
    sum.requests += one.num_model_requests;
    sum.input += one.input_tokens;
    sum.cached += one.input_cached_tokens;
    sum.output += one.output_tokens;
    sum.billedInput += one.billed_input_tokens;
    sum.billedOutput += one.billed_output_tokens;
    sum.adapterBytes += one.adapter_bytes;
    sum.pageSeconds += one.page_seconds;
    sums.set(key, sum);
  }
  return sums;
}

// Returns today's traffic of the key's tenant, or null if the key may not see it. `of(reference)` is that of a name, or
// of a version such as `voice@2`. Requests that combine adapters are not part of it.
export async function loadTraffic(me, signal) {
  if (!me.scopes.includes("usage:read")) return null;
  const results = (await loadToday("v1/usage", "model", signal)).filter((one) => one.model && !one.model.includes("+"));
  const sums = new Map([
    ...addUp(results, (one) => one.model),
    ...addUp(results.filter((one) => one.model.includes("@")), (one) => one.model.split("@")[0]),
  ]);
  const describe = (sum) => ({ requests: sum?.requests ?? 0, tokens: sum ? sum.input + sum.output : 0 });
  return { of: (reference) => describe(sums.get(reference)) };
}
