// The live feed. All views share one connection, which begins when a view needs it and lasts until the key is signed out.
// While the page is hidden, nothing is sent.

import { follow, onSignOut } from "./api.js";
import { useEffect, useState } from "./vendor/preact.js";

// About ten minutes.
const MAX_POINTS = 1500;
const MAX_EVENTS = 200;
// The server ends the stream after this many frames, and the console asks again.
const NUM_FRAMES = 100_000;

// frame: the newest; null while no engine answers; undefined before the first.
// points: what the charts show, oldest first. events: newest first.
const live = { frame: undefined, points: [], events: [] };
const listeners = new Set();
let stop = null;
let path = null;

// Returns the live state, and renders the component again with each frame.
export function useLive(me) {
  const [, setRound] = useState(0);
  useEffect(() => {
    const listener = () => setRound((last) => last + 1);
    listeners.add(listener);
    start(me.tenant === null ? "admin/live" : "v1/live");
    return () => listeners.delete(listener);
  }, []);
  return live;
}

function start(newPath) {
  path = newPath;
  if (stop !== null || document.hidden) return;
  stop = new AbortController();
  follow(`${path}?frames=${NUM_FRAMES}`, take, stop.signal).catch((error) => console.warn(error.message));
}

function pauseFeed() {
  stop?.abort();
  stop = null;
}

function take(frame) {
  live.frame = frame;
  if (frame !== null) {
    // A new engine counts its events from 1 again.
    const newest = frame.events.at(-1)?.number ?? 0;
    const known = live.events[0]?.number ?? 0;
    const last = newest < known ? 0 : known;
    const added = frame.events.filter((event) => event.number > last);
    live.events = [...added.reverse(), ...live.events].slice(0, MAX_EVENTS);
    live.points.push({ time: frame.time, counts: frame.pool.counts, traffic: frame.traffic });
    if (live.points.length > MAX_POINTS) live.points.shift();
  }
  for (const listener of listeners) listener();
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) pauseFeed();
  else if (path !== null) start(path);
});
onSignOut(() => {
  pauseFeed();
  path = null;
  Object.assign(live, { frame: undefined, points: [], events: [] });
});
