// One adapter of the tenant: its versions and its aliases.

import { call } from "../api.js";
import { link, path } from "../address.js";
import { AliasForm } from "./alias_form.js";
import { CopyButton } from "../copy.js";
import { Confirm } from "../dialog.js";
import { loadResidency } from "../residency.js";
import { loadTraffic } from "../usage.js";
import { Pager, usePages } from "../pages.js";
import { ErrorNotice, Notice, Panel, Table, formatBytes, formatCount, formatTime, useAction, useLoad } from "../ui.js";
import { html, useEffect, useRef, useState } from "../vendor/preact.js";

const PAGE = 25;
const PLACES = {
  pool: "in the page pool: a request can run at once",
  loading: "being loaded from the host into the page pool",
  host: "in the host cache; the pool has no free room for it now",
  fetching: "being fetched from the store",
};

// How an alias splits its requests, such as "3: 90 %".
export const Targets = ({ versions }) => html`<span class="targets">${Object.entries(versions).map(([number, part]) => html`
  <span class="tag" key=${number}>@${number} ${part} %</span>`)}</span>`;

export function Adapter({ me, name }) {
  const mayWrite = me.scopes.includes("adapters:write");
  const mayRun = me.scopes.includes("inference");
  const versions = usePages(path`v1/adapters/${name}/versions`, PAGE);
  const aliases = useLoad((signal) => call(path`v1/adapters/${name}/aliases`, { signal }));
  const traffic = useLoad((signal) => loadTraffic(me, signal));
  const residency = useLoad((signal) => loadResidency(me, signal));
  const [window, setWindow] = useState(null);
  const [done, setDone] = useState(null);
  const { run, isBusy, error } = useAction();
  const heading = useRef(null);
  useEffect(() => heading.current?.focus(), []);

  const close = () => setWindow(null);
  const reload = () => [versions, aliases, traffic, residency].forEach((one) => one.reload());
  async function change(method, route, what) {
    await call(route, { method });
    setDone(what);
    reload();
  }
  async function prewarm(reference) {
    setDone(null);
    await run(async () => {
      const found = await call(path`v1/adapters/${reference}/prewarm`, { method: "POST" });
      setDone(found.versions.map((one) => `${name}@${one.version} is ${PLACES[one.place] ?? one.place}.`).join(" "));
    });
  }
  const remove = (reference, route, what, isAlias = false) => setWindow(html`
    <${Removal} reference=${reference} isAlias=${isAlias} onClose=${close}
      remove=${(force) => change("DELETE", route + (force ? "?force=true" : ""), what)} />`);

  const versionColumns = [
    { name: "Version", cell: (one) => html`@${one.version}
      ${one.pinned && html` <span class="tag">pinned</span>`}` },
    { name: "Aliases", cell: (one) => html`<span class="targets">${Object.entries(one.aliases).map(([alias, part]) => html`
      <span class="tag" key=${alias}>${alias} ${part} %</span>`)}</span>` },
    { name: "Rank", isNumber: true, cell: (one) => one.rank },
    { name: "Modules", cell: (one) => html`<span class="note">${one.target_modules.join(", ")}</span>` },
    { name: "Size", isNumber: true, cell: (one) => formatBytes(one.bytes) },
    ...residency.value ? [{ name: "Page pool", cell: (one) => residency.value.of({ ...one, name }) }] : [],
    ...traffic.value ? [
      { name: "Requests today", isNumber: true,
        cell: (one) => formatCount(traffic.value.of(`${name}@${one.version}`).requests) },
      { name: "Tokens today", isNumber: true,
        cell: (one) => formatCount(traffic.value.of(`${name}@${one.version}`).tokens) },
    ] : [],
    { name: "Pushed", cell: (one) => formatTime(one.updated) },
    { name: "Digest", cell: (one) => html`<code title=${one.digest}>${one.digest.slice(0, 12)}</code>` },
    { name: "Actions", cell: (one) => html`<span class="row-actions">
      ${mayRun && html`<button aria-disabled=${isBusy} onClick=${() => prewarm(`${name}@${one.version}`)}
        aria-label=${`Prewarm version ${one.version}`}>Prewarm</button>`}
      ${mayWrite && html`<button class="danger" aria-label=${`Delete version ${one.version}`}
        onClick=${() => remove(`${name}@${one.version}`, path`v1/adapters/${`${name}@${one.version}`}`,
          `Version ${one.version} was deleted.`)}>Delete</button>`}</span>` },
  ];
  const edit = (alias) => setWindow(html`
    <${AliasForm} name=${name} alias=${alias} versions=${versions.value.data} onClose=${close}
      onMoved=${(moved) => { setDone(`The alias ${moved.alias} was moved.`); reload(); }} />`);
  const aliasColumns = [
    { name: "Alias", cell: (one) => html`${name}@${one.alias} ${one.pinned && html`<span class="tag">pinned</span>`}` },
    { name: "Versions", cell: (one) => html`<${Split} versions=${one.versions} /><${Targets} versions=${one.versions} />` },
    { name: "Follows pushes", cell: (one) => (one.follows_pushes ? "yes" : "no") },
    { name: "Moved", cell: (one) => formatTime(one.updated) },
    ...mayWrite ? [{ name: "Actions", cell: (one) => html`<span class="row-actions">
      <button onClick=${() => edit(one)} aria-label=${`Set the weights of ${one.alias}`}>Set weights</button>
      <button aria-label=${`Roll back ${one.alias}`} onClick=${() => setWindow(html`
        <${Confirm} title="Roll back" verb="Roll back" onClose=${close}
          act=${() => change("POST", path`v1/adapters/${name}/aliases/${one.alias}/rollback`,
            `The alias ${one.alias} points to where it was before its last move.`)}>
          <p><strong class="name">${name}@${one.alias}</strong> will point to where it was before its last move. The next
            requests use it.</p>
        </${Confirm}>`)}>Roll back</button>
      ${one.alias !== "latest" && html`<button class="danger" aria-label=${`Delete the alias ${one.alias}`}
        onClick=${() => remove(`${name}@${one.alias}`, path`v1/adapters/${name}/aliases/${one.alias}`,
          `The alias ${one.alias} was deleted.`, true)}>Delete</button>`}</span>` }] : [],
  ];

  return html`
    <p class="path"><a href=${link("adapters")}>All adapters</a></p>
    <div class="title">
      <h2 class="name" tabindex="-1" ref=${heading}>${name}</h2>
      <span class="row-actions">
        <${CopyButton} text=${name} label="Copy name" />
        ${mayRun && html`<button aria-disabled=${isBusy} onClick=${() => prewarm(name)}>Prewarm</button>`}
        ${mayWrite && versions.value && html`<button class="danger" onClick=${() => setWindow(html`
          <${Confirm} title="Delete the adapter" verb="Delete" typed=${name} onClose=${close}
            act=${async () => {
              await call(path`v1/adapters/${name}?force=true`, { method: "DELETE" });
              location.hash = link("adapters");
            }}>
            <p>All versions and aliases of <strong class="name">${name}</strong> are deleted. Requests in progress finish,
              later ones are refused. Nothing brings the adapter back.</p>
          </${Confirm}>`)}>Delete adapter</button>`}
      </span>
    </div>
    <div aria-live="polite">${done && html`<${Notice} kind="good">${done}</${Notice}>`}</div>
    <${ErrorNotice} error=${error} />
    <${ErrorNotice} error=${versions.error ?? aliases.error ?? traffic.error} />
    <div class="panels">
      <${Panel} title="Aliases" wide actions=${mayWrite && versions.value && html`
          <button onClick=${() => edit(null)}>New alias</button>`}>
        ${aliases.value && html`<${Table} caption="Aliases" columns=${aliasColumns} rows=${aliases.value.data}
          rowKey=${(one) => one.alias} />`}
      </${Panel}>
      <${Panel} title="Versions" wide actions=${html`<button onClick=${reload}>Refresh</button>`}>
        ${versions.value && html`
          <${Table} caption="Versions" columns=${versionColumns} rows=${versions.value.data}
            rowKey=${(one) => one.version} />
          <${Pager} ...${versions.pager} back="Newer" next="Older" />`}
      </${Panel}>
    </div>
    ${window}`;
}

// A bar whose parts are the percentages of the versions. The tags beside it say the same in words.
const Split = ({ versions }) => {
  let start = 0;
  return html`<svg class="split" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">
    ${Object.entries(versions).map(([number, part], index) => {
      start += part;
      return html`<rect key=${number} class=${`part-${index % 3}`} x=${start - part} width=${part} height="8" />`;
    })}</svg>`;
};

// Asks before a deletion. The server refuses to delete a version to which an alias points, unless that is forced.
function Removal({ reference, isAlias, remove, onClose }) {
  const [isForced, setForced] = useState(false);
  return html`
    <${Confirm} title=${isAlias ? "Delete the alias" : "Delete the version"} verb="Delete" onClose=${onClose}
      act=${() => remove(isForced)}>
      <p><strong class="name">${reference}</strong> is deleted. Requests in progress finish, later ones are refused.</p>
      ${!isAlias && html`<label class="check"><input type="checkbox" checked=${isForced}
        onChange=${(event) => setForced(event.target.checked)} /> Delete it also if an alias points to it</label>`}
    </${Confirm}>`;
}
