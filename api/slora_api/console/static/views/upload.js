// The upload of an adapter: files by drag and drop or by a file chooser, or an adapter of the hub that the server downloads;
// the progress, and the certificate or the reasons for refusal.

import { call, upload } from "../api.js";
import { chooseFiles, fromDrop, fromInput } from "../adapter_files.js";
import { link } from "../address.js";
import { ErrorNotice, Figure, Notice, Panel, Table, formatBytes, formatNumber, formatShare } from "../ui.js";
import { html, useEffect, useRef, useState } from "../vendor/preact.js";

const OWN_ROUTE = "v1/adapters";
const BASES = {
  "verified": "verified: the fingerprint of the served model",
  "name-matched": "the adapter's config names the served model",
  "unverified": "unverified: the adapter's config names another model, or none",
};

// route: that of the key's own adapters, or of the adapters of a tenant. hasPages: whether the adapter has a page of its own.
export function Upload({ route = OWN_ROUTE, mayUseHub, hasPages, onUploaded }) {
  const [chosen, setChosen] = useState(null);
  const [name, setName] = useState("");
  const [source, setSource] = useState("");
  const [isOver, setOver] = useState(false);
  // The part that is sent, or null while nothing is sent.
  const [progress, setProgress] = useState(null);
  const [published, setPublished] = useState(null);
  const [error, setError] = useState(null);
  const cancel = useRef(null);
  const input = useRef(null);
  const folderInput = useRef(null);
  // Leaving the view ends the upload.
  useEffect(() => () => cancel.current?.abort(), []);

  function take(items) {
    if (items.length === 0) return;
    const found = chooseFiles(items);
    setChosen(found);
    setSource("");
    setPublished(null);
    setError(null);
    if (found.name) setName(found.name.toLowerCase());
  }
  async function drop(event) {
    event.preventDefault();
    setOver(false);
    try {
      take(await fromDrop(event.dataTransfer));
    } catch {
      setError(new Error("The dropped files cannot be read. Choose them with a button instead."));
    }
  }
  function nameSource(text) {
    setSource(text);
    setChosen(null);
    setName(text.replace(/^hf:\/\//, "").replace(/@[^/]*/, "").split("/").filter(Boolean).at(-1)?.toLowerCase() ?? "");
  }
  async function send(event) {
    event.preventDefault();
    const form = new FormData();
    const files = chosen?.fields ?? {};
    // The server reads the name first, so that it can refuse the upload before it has read the weights.
    form.append("name", name);
    if (chosen === null) form.append("source", source.trim().replace(/^(hf:\/\/)?/, "hf://"));
    for (const [field, file] of Object.entries(files)) form.append(field, file, file.name);
    setError(null);
    setPublished(null);
    setProgress(0);
    cancel.current = new AbortController();
    try {
      // An operator's key cannot read a tenant's limits.
      if (route === OWN_ROUTE) await checkSize(Object.values(files));
      setPublished(await upload(route, form, { onProgress: setProgress, signal: cancel.current.signal }));
      setChosen(null);
      setSource("");
      onUploaded();
    } catch (thrown) {
      if (thrown.name !== "AbortError") setError(thrown);
    }
    cancel.current = null;
    setProgress(null);
  }

  const isBusy = progress !== null;
  return html`
    <${Panel} title="Upload an adapter" wide>
      <form onSubmit=${send}>
        <div class=${isOver ? "drop over" : "drop"} onDragOver=${(event) => { event.preventDefault(); setOver(true); }}
          onDragLeave=${() => setOver(false)} onDrop=${drop}>
          <p>Drop the folder of a PEFT adapter here, its files, or one archive of it.</p>
          <span class="row-actions">
            <button type="button" disabled=${isBusy} onClick=${() => input.current.click()}>Choose files</button>
            <button type="button" disabled=${isBusy} onClick=${() => folderInput.current.click()}>Choose a folder</button>
          </span>
          <input type="file" multiple hidden ref=${input} aria-label="Files of the adapter"
            onChange=${(event) => { take(fromInput(event.target.files)); event.target.value = ""; }} />
          <input type="file" webkitdirectory hidden ref=${folderInput} aria-label="Folder of the adapter"
            onChange=${(event) => { take(fromInput(event.target.files)); event.target.value = ""; }} />
        </div>
        ${mayUseHub && html`
          <div class="fields">
            <label>Or an adapter of the Hugging Face hub, which the server downloads
              <input value=${source} onInput=${(event) => nameSource(event.target.value)} placeholder="org/repo@revision"
                maxlength="512" size="40" disabled=${isBusy} autocomplete="off" spellcheck=${false} /></label>
          </div>`}
        ${chosen && html`<${Chosen} chosen=${chosen} />`}
        ${(chosen ? !chosen.problem : source.trim() !== "") && html`
          <div class="fields">
            <label>Name of the adapter
              <input value=${name} onInput=${(event) => setName(event.target.value)} required maxlength="128"
                disabled=${isBusy} autocomplete="off" spellcheck=${false} /></label>
            <button class="primary" disabled=${isBusy || name === ""}>Upload</button>
            ${isBusy && html`<button type="button" onClick=${() => cancel.current?.abort()}>Cancel</button>`}
          </div>
          <p class="note">The upload makes the next version of this name.</p>`}
        ${isBusy && html`<${Progress} part=${progress} />`}
      </form>
      <${ErrorNotice} error=${error} />
      ${published && html`<${Published} published=${published} hasPages=${hasPages} />`}
    </${Panel}>`;
}

// Refuses files that the server would refuse for their size, before they are sent. A key without the scope `inference`
// cannot read the limit.
async function checkSize(files) {
  const limits = await call("v1/limits").catch(() => null);
  const size = files.reduce((sum, file) => sum + file.size, 0);
  if (limits !== null && size > limits.upload_bytes) {
    throw new Error(`The files have ${formatBytes(size)}; the server accepts at most ${formatBytes(limits.upload_bytes)}.`);
  }
}

const Chosen = ({ chosen }) => html`
  ${chosen.problem && html`<${Notice} kind="warning">${chosen.problem}</${Notice}>`}
  <ul class="plain">
    ${Object.entries(chosen.fields).map(([field, file]) => html`
      <li key=${field}><code>${file.name}</code> ${formatBytes(file.size)}</li>`)}
    ${chosen.ignored.length > 0 && html`
      <li class="note">Not uploaded: ${chosen.ignored.slice(0, 10).join(", ")}${chosen.ignored.length > 10 ? ", …" : ""}</li>`}
  </ul>`;

const Progress = ({ part }) => html`
  <div class="progress">
    ${part < 1
      ? html`<progress max="1" value=${part} aria-label="Sent" /> <span>${Math.floor(part * 100)} % sent</span>`
      : html`<progress aria-label="The server checks the adapter" />
        <span role="status">The server checks the adapter and tries it out …</span>`}
  </div>`;

function Published({ published, hasPages }) {
  // The form that had the focus is gone.
  const heading = useRef(null);
  useEffect(() => heading.current.focus(), []);
  const found = published.certificate;
  const loads = Object.entries(found.predicted_load_ms ?? {}).filter(([, ms]) => ms !== null);
  const ranks = Object.values(found.modules).flatMap((one) => [one.min_rank, one.max_rank]);
  const columns = [
    { name: "Module", cell: ([module]) => module },
    { name: "Adapted", isNumber: true, cell: ([, one]) => `${one.adapted} of ${one.total}` },
    { name: "Rank", isNumber: true, cell: ([, one]) => range(one.min_rank, one.max_rank) },
    { name: "Largest norm", isNumber: true, cell: ([, one]) => formatNumber(one.max_norm) },
  ];
  return html`
    <${Notice} kind="good">${published.new_version
      ? `${published.name}@${published.version} passed all checks and is served now.`
      : `The newest version, ${published.name}@${published.version}, already is this adapter. Nothing was changed.`}</${Notice}>
    <h3 tabindex="-1" ref=${heading}>Certificate</h3>
    <dl class="figures">
      <${Figure} name="Modules" value=${`${found.modules_adapted} of ${found.modules_total}`}
        unit=${formatShare(found.modules_adapted / found.modules_total)} />
      <${Figure} name="Rank" value=${range(Math.min(...ranks), Math.max(...ranks))} />
      <${Figure} name="Files" value=${formatBytes(published.stored_bytes)} />
      <${Figure} name="In the page pool" value=${formatBytes(found.pool_bytes)} />
      <${Figure} name="Largest change of a log-probability"
        value=${found.logprob_change === null ? "tried out before" : formatNumber(found.logprob_change)} />
      <${Figure} name="Base model" value=${found.base} title=${BASES[found.base]} />
      ${loads.map(([tier, ms]) => html`<${Figure} key=${tier} name=${`Load from ${tier}`} value=${formatNumber(ms)} unit="ms" />`)}
    </dl>
    <${Table} caption="Modules of the adapter" columns=${columns} rows=${Object.entries(found.modules)} rowKey=${([module]) => module} />
    <p class="note">Digest <code>${published.digest}</code>${published.source && html`, from <code>${published.source}</code>`}</p>
    ${hasPages && html`<p><a href=${link("adapters", published.name)}>Versions and aliases of ${published.name}</a></p>`}`;
}

const range = (least, most) => (least === most ? String(least) : `${least} to ${most}`);
