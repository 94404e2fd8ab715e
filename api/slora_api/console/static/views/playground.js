// One prompt to several models side by side, with the timing of each.

import { call } from "../api.js";
import { Answer } from "../answer.js";
import { CopyButton } from "../copy.js";
import { ErrorNotice, Figure, Panel, formatNumber, formatSeconds, useLoad } from "../ui.js";
import { writeCurl, writePython } from "../snippets.js";
import { html, useEffect, useRef, useState } from "../vendor/preact.js";

// A browser opens six connections to a server. More requests would wait for each other, and their times would be wrong.
const MAX_MODELS = 4;
const NUM_CHOSEN = 3;
const REDRAW_MS = 40;
const FIELDS = [
  { field: "max_tokens", title: "Max tokens", initial: "200", step: "1" },
  { field: "temperature", title: "Temperature", step: "any" },
  { field: "top_p", title: "Top p", step: "any" },
  { field: "top_k", title: "Top k", step: "1" },
  { field: "min_p", title: "Min p", step: "any" },
  { field: "repetition_penalty", title: "Repetition penalty", step: "any" },
  { field: "seed", title: "Seed", step: "1" },
];
const STATES = { idle: "not sent yet", waiting: "waiting for the first token", streaming: "streaming", done: "complete",
  stopped: "stopped", failed: "failed" };

export function View() {
  const models = useLoad(async (signal) => (await call("v1/models?limit=1000", { signal })).data);
  const [chosen, setChosen] = useState(null);
  const [wanted, setWanted] = useState("");
  const [prompt, setPrompt] = useState({ system: "", user: "", stop: "" });
  const [sampling, setSampling] = useState(() =>
    Object.fromEntries(FIELDS.map(({ field, initial = "" }) => [field, initial])));
  const [answers, setAnswers] = useState([]);
  const [, setRound] = useState(0);
  const stop = useRef(null);
  useEffect(() => () => stop.current?.abort(), []);

  const names = chosen ?? suggest(models.value ?? []);
  const isRunning = answers.some((one) => one.isActive);
  const add = () => {
    const name = wanted.trim();
    if (name !== "" && !names.includes(name) && names.length < MAX_MODELS) setChosen([...names, name]);
    setWanted("");
  };

  async function run(event) {
    event.preventDefault();
    if (isRunning || names.length === 0) return;
    const control = new AbortController();
    stop.current = control;
    let timer = null;
    const redraw = () => {
      timer ??= setTimeout(() => { timer = null; setRound((last) => last + 1); }, REDRAW_MS);
    };
    const started = names.map((model) => new Answer(makeBody(model, prompt, sampling), redraw));
    setAnswers(started);
    await Promise.all(started.map((one) => one.run(control.signal)));
  }
  const set = (field) => (event) => setPrompt({ ...prompt, [field]: event.target.value });
  const submitByKey = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) event.target.form.requestSubmit();
  };

  return html`
    <${ErrorNotice} error=${models.error} />
    <div class="playground">
      <${Panel} title="Prompt">
        <form onSubmit=${run} onKeyDown=${submitByKey}>
          <label>System <textarea rows="2" value=${prompt.system} onInput=${set("system")}
            placeholder="optional"></textarea></label>
          <label>User <textarea rows="4" value=${prompt.user} onInput=${set("user")} required></textarea></label>
          <fieldset><legend>Models</legend>
            <ul class="chips">
              ${names.map((name) => html`<li key=${name}><span class="name">${name}</span>
                <button type="button" aria-label=${`Remove ${name}`}
                  onClick=${() => setChosen(names.filter((one) => one !== name))}>×</button></li>`)}
            </ul>
            ${names.length < MAX_MODELS && html`<span class="fields">
              <input list="models" value=${wanted} aria-label="Model to add" placeholder="name, name@3 or name@alias"
                onInput=${(event) => setWanted(event.target.value)} autocomplete="off" spellcheck=${false}
                onKeyDown=${(event) => {
                  if (event.key === "Enter" && wanted.trim() !== "") { event.preventDefault(); event.stopPropagation(); add(); }
                }} />
              <button type="button" onClick=${add}>Add</button></span>`}
            <datalist id="models">${(models.value ?? []).map((one) => html`<option key=${one.id} value=${one.id}></option>`)}
            </datalist>
            <p class="note">${names.length < MAX_MODELS
              ? `Up to ${MAX_MODELS} models answer at the same time.`
              : `These are the ${MAX_MODELS} models that can answer at the same time.`}</p>
          </fieldset>
          <div class="field-grid">
            ${FIELDS.map(({ field, title, step }) => html`
              <label key=${field}>${title} <input type="number" step=${step} value=${sampling[field]} placeholder="default"
                onInput=${(event) => setSampling({ ...sampling, [field]: event.target.value })} /></label>`)}
            <label>Stop at <input value=${prompt.stop} onInput=${set("stop")} placeholder="no text" autocomplete="off" /></label>
          </div>
          <div class="buttons">
            <button class="primary" aria-disabled=${isRunning || names.length === 0} title="Ctrl+Enter">Send</button>
            <button type="button" aria-disabled=${!isRunning} onClick=${() => stop.current?.abort()}>Stop</button>
          </div>
        </form>
      </${Panel}>
      <div class="answers">
        ${names.map((name) => html`<${Column} key=${name} name=${name} body=${makeBody(name, prompt, sampling)}
          answer=${answers.find((one) => one.model === name)} />`)}
        ${names.length === 0 && models.value && html`<p class="empty">Add a model to compare answers.</p>`}
      </div>
    </div>`;
}

const suggest = (models) => {
  const base = models.find((one) => one.parent === null);
  const adapters = models.filter((one) => one.parent !== null && !one.id.includes("@"));
  return [...base ? [base] : [], ...adapters].slice(0, NUM_CHOSEN).map((one) => one.id);
};

// Only what the user has filled in is sent.
function makeBody(model, { system, user, stop }, sampling) {
  const messages = [{ role: "user", content: user }];
  if (system.trim() !== "") messages.unshift({ role: "system", content: system });
  const set = Object.entries(sampling).filter(([, text]) => text !== "").map(([field, text]) => [field, Number(text)]);
  return { model, messages, ...Object.fromEntries(set), ...stop !== "" && { stop: [stop] } };
}

function Column({ name, body, answer }) {
  const state = answer?.state ?? "idle";
  return html`
    <section class="panel answer" aria-label=${`Answer of ${name}`}>
      <header><h2 class="name">${name}</h2><span class="tag">${STATES[state]}</span></header>
      <${ErrorNotice} error=${answer?.error} />
      ${answer?.reasoning && html`<p class="text reasoning">${answer.reasoning}</p>`}
      ${answer?.text
        ? html`<p class="text">${answer.text}</p>`
        : state === "done" && html`<p class="empty">The answer has no text.</p>`}
      <dl class="figures">
        <${Figure} name="First token" value=${formatSeconds(answer?.firstTokenS)} />
        <${Figure} name="Tokens/s" value=${answer?.tokensPerS == null ? "–" : formatNumber(answer.tokensPerS)}
          title="Tokens after the first one, by the time since the first one" />
        <${Figure} name="Total" value=${formatSeconds(answer?.totalS)} />
        <${Figure} name="Tokens" value=${answer?.usage ? `${answer.usage.prompt_tokens} + ${answer.usage.completion_tokens}` : "–"}
          title="Prompt and answer" />
      </dl>
      <p class="note">${[answer?.version && `answered by ${answer.version}`, answer?.finishReason && `ended by ${answer.finishReason}`]
        .filter(Boolean).join(", ")}</p>
      <span class="row-actions">
        <${CopyButton} label="Copy as curl" text=${() => writeCurl(body)} />
        <${CopyButton} label="Copy as Python" text=${() => writePython(body)} />
      </span>
    </section>`;
}
