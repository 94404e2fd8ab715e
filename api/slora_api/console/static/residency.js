// Which adapters the page pool holds, as one frame of the live feed shows it.

import { stream } from "./api.js";

const STATES = { adapter: "in use", idle_adapter: "loaded" };

// Returns an object whose `of(version)` is the state of a version in the pool. Returns null if the key may not see it, if
// no engine answers, and for a pool of which the feed shows only some pages, where it may miss a small adapter.
export async function loadResidency(me, signal) {
  if (!me.scopes.includes("usage:read")) return null;
  for await (const frame of stream("v1/live", { signal })) {
    if (frame === null || frame.pool.stride > 1) return null;
    const owners = frame.pool.owners.filter((one) => one.tenant === me.tenant && one.content in STATES);
    const states = new Map(owners.map((one) => [one.adapter, STATES[one.content]]));
    // The feed names an adapter by the beginning of its digest until it has looked the name up.
    const findDigest = (digest) => [...states.keys()].find((name) => digest.startsWith(name));
    return { of: ({ name, version, digest }) => states.get(`${name}@${version}`) ?? states.get(findDigest(digest)) ?? "–" };
  }
  return null;
}
