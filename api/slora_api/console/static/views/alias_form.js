// The form that moves an alias, or makes one.

import { call } from "../api.js";
import { path } from "../address.js";
import { FormDialog } from "../dialog.js";
import { html, useState } from "../vendor/preact.js";

const ROLL_OUT_PERCENT = 10;

// alias: the alias as the API describes it, or null for a new one. versions: the newest versions of the adapter, newest
// first. A version that is older and in use is listed, too.
export function AliasForm({ name, alias, versions, onMoved, onClose }) {
  const used = alias?.versions ?? {};
  const numbers = [...new Set([...versions.map((one) => String(one.version)), ...Object.keys(used)])];
  const newest = numbers[0];
  const [weights, setWeights] = useState(() => (alias ? used : { [newest]: 100 }));
  const [follows, setFollows] = useState(alias?.follows_pushes ?? false);
  const [label, setLabel] = useState("");
  const sum = Object.values(weights).reduce((total, part) => total + part, 0);
  const main = Object.entries(used).sort(([, one], [, other]) => other - one)[0]?.[0];
  const canRollOut = main !== undefined && main !== newest;

  const set = (number, text) => {
    const part = Math.min(Math.max(Math.trunc(Number(text)) || 0, 0), 100);
    const { [number]: _, ...others } = weights;
    setWeights(part === 0 ? others : { ...others, [number]: part });
  };
  async function send() {
    const target = alias?.alias ?? label.trim();
    // Refused if another client has moved the alias since this form was opened.
    const body = { versions: weights, expected: alias ? used : {}, follows_pushes: follows };
    onMoved(await call(path`v1/adapters/${name}/aliases/${target}`, { method: "PUT", body }));
  }

  return html`
    <${FormDialog} title=${alias ? `Weights of ${alias.alias}` : "New alias"} verb=${alias ? "Move the alias" : "Create"}
      send=${send} isValid=${sum === 100 && (alias !== null || label.trim() !== "")} onClose=${onClose}>
      ${!alias && html`
        <label>Name of the alias
          <input value=${label} onInput=${(event) => setLabel(event.target.value)} required autocomplete="off"
            spellcheck=${false} placeholder="prod" /></label>`}
      <p class="note">The percentage of requests that each version gets. A user who got a version keeps it while its part
        grows.</p>
      ${canRollOut && html`<p class="row-actions">
        <button type="button" onClick=${() => setWeights({ [main]: 100 - ROLL_OUT_PERCENT, [newest]: ROLL_OUT_PERCENT })}>
          Roll out ${ROLL_OUT_PERCENT} % of version ${newest}</button>
        <button type="button" onClick=${() => setWeights({ [newest]: 100 })}>Version ${newest} for all</button></p>`}
      <div class="weights">
        ${numbers.map((number) => html`
          <label key=${number}>Version ${number}
            <span><input type="number" min="0" max="100" step="1" value=${weights[number] ?? 0}
              aria-label=${`Percentage of version ${number}`}
              onInput=${(event) => set(number, event.target.value)} /> %</span></label>`)}
      </div>
      <p class=${sum === 100 ? "note" : "wrong"} role="status">The sum is ${sum} %${sum === 100 ? "." : "; it must be 100 %."}</p>
      <label class="check"><input type="checkbox" checked=${follows} onChange=${(event) => setFollows(event.target.checked)} />
        Each later push moves the alias to the new version</label>
    </${FormDialog}>`;
}
