// The engines of a server that has several of them, for operators.

import { call } from "../api.js";
import { path } from "../address.js";
import { Confirm } from "../dialog.js";
import { Panel, Table, formatCount, formatNumber, formatShare } from "../ui.js";
import { html, useState } from "../vendor/preact.js";

// engines: those of the newest frame.
export function Engines({ engines }) {
  const [chosen, setChosen] = useState(null);
  const shown = (value, format) => (value === null ? "–" : format(value));
  const columns = [
    { name: "Engine", cell: (one) => one.name },
    { name: "State", cell: (one) => (one.serving
      ? html`<span class="tag">serving</span>`
      : html`<span class="tag lost">not serving</span> <span class="note">${one.detail}</span>`) },
    { name: "Device", cell: (one) => one.device ?? "–" },
    { name: "Pages used", isNumber: true, cell: (one) => shown(one.num_pages, (pages) =>
      `${formatCount(one.used_pages)} of ${formatCount(pages)} (${formatShare(one.used_pages / pages)})`) },
    { name: "Running", isNumber: true, cell: (one) => shown(one.running, formatCount) },
    { name: "Waiting", isNumber: true, cell: (one) => shown(one.waiting, formatCount) },
    { name: "Tokens/s", isNumber: true, cell: (one) => shown(one.tokens_per_s, formatNumber) },
    { name: "Steps/s", isNumber: true, cell: (one) => shown(one.steps_per_s, formatNumber) },
    { name: "Actions", cell: (one) => html`<button aria-label=${`Restart ${one.name}`} onClick=${() => setChosen(one.name)}>
      Restart</button>` },
  ];
  return html`
    <${Panel} title="Engines" wide>
      <${Table} caption="Engines" columns=${columns} rows=${engines} rowKey=${(one) => one.name} />
      ${chosen !== null && html`
        <${Restart} name=${chosen} engines=${engines} onClose=${() => setChosen(null)} />`}
    </${Panel}>`;
}

function Restart({ name, engines, onClose }) {
  const hasOther = engines.some((one) => one.serving && one.name !== name);
  const send = () => call(path`admin/engines/${name}/restart`, { method: "POST", body: { allow_outage: !hasOther } });
  return html`
    <${Confirm} title=${`Restart ${name}`} verb="Restart" act=${send} onClose=${onClose}>
      ${hasOther
        ? html`<p>It gets no new requests, and the other engines continue its answers. No request is refused. It loads the
            model again before it serves.</p>`
        : html`<p><strong>No other engine serves.</strong> New requests are refused until it has loaded the model again, and
            answers in progress pause or end with an error.</p>`}
    </${Confirm}>`;
}
