// The page pool: what each page holds and for which tenant, now and in the last minutes.

import { Chart, Marks } from "../chart.js";
import { colorOf, cssColor } from "../colors.js";
import { Engines } from "./engines.js";
import { useLive } from "../live.js";
import { Figure, Notice, Panel, Table, formatCount, formatNumber, formatShare, sortByName, useWidth } from "../ui.js";
import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact.js";

const CONTENTS = {
  kv: "KV of running requests",
  prefix: "cached prefix",
  adapter: "adapter in use",
  idle_adapter: "idle adapter",
  other: "other tenants",
};
const EVENTS = {
  load: "adapter loaded",
  eviction: "adapter evicted",
  prefix_eviction: "cached prefixes evicted",
  preemption: "request preempted",
};
const MAX_HEIGHT = 380, MIN_CELL = 3, MAX_CELL = 20;
// Smaller cells have no room for the mark of an adapter.
const MARKED_CELL = 6;
const MOST_ADAPTERS = 10;

const isAdapter = (owner) => owner.content === "adapter" || owner.content === "idle_adapter";
const isIdle = (owner) => owner.content === "prefix" || owner.content === "idle_adapter";

function describe(owner) {
  if (owner === null) return "free";
  const whose = owner.tenant === null ? "" : ` of ${owner.tenant}`;
  if (owner.content === "other") return "another tenant";
  return isAdapter(owner) ? `${CONTENTS[owner.content]}: ${owner.adapter}${whose}` : `${CONTENTS[owner.content]}${whose}`;
}

function decode(cells) {
  const text = atob(cells);
  return Uint8Array.from(text, (character) => character.charCodeAt(0));
}

// The size of a cell and the number of columns for `count` cells.
function arrange(count, width) {
  let size = Math.min(MAX_CELL, Math.max(MIN_CELL, Math.floor(Math.sqrt((width * MAX_HEIGHT) / count))));
  while (size > MIN_CELL && Math.ceil(count / Math.floor(width / size)) * size > MAX_HEIGHT) size -= 1;
  return { size, columns: Math.max(1, Math.floor(width / size)) };
}

function draw(canvas, cells, owners, { size, columns }, selected) {
  const scale = devicePixelRatio || 1;
  const width = columns * size, height = Math.ceil(cells.length / columns) * size;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const styles = getComputedStyle(canvas);
  const color = (name) => styles.getPropertyValue(name).trim();
  const paints = [null, ...owners].map((owner) => (owner === null ? color("--free") : color(colorOf(owner.tenant))));
  const surface = color("--surface");
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const inner = size - (size > 4 ? 1.5 : 1);
  cells.forEach((cell, at) => {
    const x = (at % columns) * size, y = Math.floor(at / columns) * size;
    const owner = cell === 0 ? null : owners[cell - 1];
    context.globalAlpha = owner !== null && isIdle(owner) ? 0.45 : 1;
    context.fillStyle = paints[cell];
    context.fillRect(x, y, inner, inner);
    context.globalAlpha = 1;
    if (owner !== null && isAdapter(owner) && size >= MARKED_CELL) {
      const rim = inner * 0.3;
      context.fillStyle = surface;
      context.fillRect(x + rim, y + rim, inner - 2 * rim, inner - 2 * rim);
    }
  });
  if (selected !== null) {
    context.strokeStyle = color("--text");
    context.lineWidth = 2;
    context.strokeRect((selected % columns) * size, Math.floor(selected / columns) * size, inner, inner);
  }
}

function PageMap({ pool }) {
  const canvas = useRef(null);
  const box = useRef(null);
  const width = useWidth(box);
  const [theme, setTheme] = useState(0);
  const [selected, setSelected] = useState(null);
  const cells = useMemo(() => decode(pool.cells), [pool.cells]);
  const layout = arrange(cells.length, width);

  useEffect(() => {
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const redraw = () => setTheme((last) => last + 1);
    dark.addEventListener("change", redraw);
    return () => dark.removeEventListener("change", redraw);
  }, []);
  useEffect(() => {
    if (width > 0) draw(canvas.current, cells, pool.owners, layout, selected);
  }, [cells, width, selected, theme]);

  function point(event) {
    const { left, top } = canvas.current.getBoundingClientRect();
    const column = Math.floor((event.clientX - left) / layout.size), row = Math.floor((event.clientY - top) / layout.size);
    const at = row * layout.columns + column;
    setSelected(column >= 0 && column < layout.columns && at >= 0 && at < cells.length ? at : null);
  }
  function press(event) {
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: layout.columns, ArrowUp: -layout.columns };
    if (event.key === "Escape") setSelected(null);
    if (!(event.key in moves)) return;
    event.preventDefault();
    setSelected((last) => (last === null ? 0 : Math.min(cells.length - 1, Math.max(0, last + moves[event.key]))));
  }

  const cell = selected === null ? null : cells[selected];
  const found = selected === null ? null : describe(cell === 0 ? null : pool.owners[cell - 1]);
  return html`
    <div class="map" ref=${box}>
      <canvas ref=${canvas} tabindex="0" role="application" aria-label="Map of the page pool"
        aria-describedby="map-help" onPointerMove=${point} onPointerLeave=${() => setSelected(null)}
        onKeyDown=${press}></canvas>
    </div>
    <p class="readout" aria-live="polite">
      ${found === null
        ? html`<span id="map-help" class="note">Point at a page, or move with the arrow keys, to see what it holds.</span>`
        : html`<b>Page ${formatCount(selected * pool.stride)}</b>: ${found}<span id="map-help"></span>`}
    </p>
    <ul class="legend">
      <li><i class="swatch kv"></i>KV of running requests</li>
      <li><i class="swatch prefix"></i>cached prefixes</li>
      <li><i class="swatch adapter"></i>adapters in use</li>
      <li><i class="swatch idle_adapter"></i>idle adapters</li>
      ${pool.owners.some((owner) => owner.content === "other") && html`<li><i class="swatch others"></i>other tenants</li>`}
      <li><i class="swatch free"></i>free</li>
      ${pool.stride > 1 && html`<li class="note">The pool has more pages than squares: each square shows one page of ${pool.stride}.</li>`}
    </ul>`;
}

function rowsOf({ pool, tenants }) {
  const rows = sortByName(tenants).map((one) => ({ ...one, total: one.kv + one.prefixes + one.adapters + one.idle_adapters }));
  if (pool.counts.other > 0) rows.push({ tenant: null, total: pool.counts.other });
  rows.push({ isFree: true, total: pool.counts.free });
  return rows;
}

// The adapters with the most pages. Where a square stands for several pages, their numbers are estimates.
function countAdapters({ pool }) {
  const sums = new Map();
  for (const cell of decode(pool.cells)) {
    const owner = cell === 0 ? null : pool.owners[cell - 1];
    if (owner === null || !isAdapter(owner)) continue;
    const key = `${owner.tenant} ${owner.adapter}`;
    const one = sums.get(key) ?? { key, ...owner, pages: 0 };
    sums.set(key, { ...one, pages: one.pages + pool.stride });
  }
  return [...sums.values()].sort((one, other) => other.pages - one.pages).slice(0, MOST_ADAPTERS);
}

const name = (row) => {
  if (row.isFree) return html`<i class="swatch free"></i>free`;
  return html`<i class="swatch" style=${{ background: cssColor(colorOf(row.tenant)) }}></i>${row.tenant ?? "other tenants"}`;
};
const count = (value) => (value === undefined ? "" : formatCount(value));

export function View({ me }) {
  const { frame, points, events } = useLive(me);
  if (frame === undefined) return html`<${Notice}>Waiting for the first frame …</${Notice}>`;
  if (frame === null) {
    return html`<${Notice} kind="warning">No engine answers. It may be starting; the view continues by itself.</${Notice}>`;
  }
  const { pool } = frame;
  const { counts, num_pages: total } = pool;
  const share = (value) => formatShare(value / total);
  const series = [
    { name: "KV", color: "var(--kv)", value: (point) => point.counts.kv },
    { name: "adapters", color: "var(--adapters)", value: (point) => point.counts.adapters + point.counts.idle_adapters },
    { name: "cached prefixes", color: "var(--prefixes)", value: (point) => point.counts.prefixes },
    ...(me.tenant === null ? [] : [{ name: "other tenants", color: "var(--c-other)", value: (point) => point.counts.other }]),
  ];
  return html`
    <div class="panels halves">
      <${Panel} title="Pages" wide>
        <dl class="figures">
          <${Figure} name="Pages" value=${formatCount(total)} />
          <${Figure} name="KV" value=${formatCount(counts.kv)} unit=${share(counts.kv)} />
          <${Figure} name="Adapters" value=${formatCount(counts.adapters + counts.idle_adapters)}
            unit=${share(counts.adapters + counts.idle_adapters)} />
          <${Figure} name="Cached prefixes" value=${formatCount(counts.prefixes)} unit=${share(counts.prefixes)} />
          ${me.tenant !== null && html`<${Figure} name="Other tenants" value=${formatCount(counts.other)} unit=${share(counts.other)} />`}
          <${Figure} name="Free" value=${formatCount(counts.free)} unit=${share(counts.free)} />
        </dl>
        <${PageMap} pool=${pool} />
        ${frame.engines.length > 1 && html`<p class="note">The pools of ${frame.engines.length} engines, one after the
          other.</p>`}
      </${Panel}>
      ${frame.engines.length > 1 && html`<${Engines} engines=${frame.engines} />`}
      <${Panel} title="The last minutes">
        <${Chart} title="Pages by content" points=${points} series=${series} stacked height=${300} format=${formatNumber}
          events=${events} />
        <${Marks} />
      </${Panel}>
      <${Panel} title="Pages by owner">
        <${Table} caption="Pages by owner" rows=${rowsOf(frame)} rowKey=${(row) => (row.isFree ? "/free" : row.tenant ?? "/other")}
          columns=${[
            { name: "Owner", cell: name },
            { name: "KV", cell: (row) => count(row.kv), isNumber: true },
            { name: "Prefixes", cell: (row) => count(row.prefixes), isNumber: true },
            { name: "Adapters", cell: (row) => count(row.adapters), isNumber: true },
            { name: "Idle", cell: (row) => count(row.idle_adapters), isNumber: true },
            { name: "Total", cell: (row) => count(row.total), isNumber: true },
          ]} />
      </${Panel}>
      <${Panel} title="Adapters with the most pages" wide>
        <${Table} caption="Adapters with the most pages" rows=${countAdapters(frame)} rowKey=${(row) => row.key}
          empty="No adapter is in the pool." columns=${[
            { name: "Adapter", cell: (row) => row.adapter },
            { name: "Tenant", cell: name },
            { name: "State", cell: (row) => (isIdle(row) ? "idle" : "in use") },
            { name: "Pages", cell: (row) => `${pool.stride > 1 ? "about " : ""}${formatCount(row.pages)}`, isNumber: true },
            { name: "Of the pool", cell: (row) => share(row.pages), isNumber: true },
          ]} />
      </${Panel}>
      <${Panel} title="What happened" wide>
        <${Table} caption="Recent loads, evictions and preemptions" rows=${events.slice(0, 12)}
          rowKey=${(event) => `${event.number} ${event.time}`} empty="No load, eviction or preemption since you opened the view."
          columns=${[
            { name: "Time", cell: ({ time }) => new Date(time * 1000).toLocaleTimeString() },
            { name: "What", cell: ({ kind, times }) => `${EVENTS[kind]}${times > 1 ? ` (${times} times)` : ""}` },
            { name: "Adapter", cell: ({ adapter }) => adapter ?? "" },
            { name: "Tenant", cell: ({ tenant }) => tenant },
          ]} />
      </${Panel}>
    </div>`;
}
