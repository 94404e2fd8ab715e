// One prompt to several models side by side, with the timing of each.

import { call, currentKey, keep, recall } from "../api.js";
import { Answer } from "../answer.js";
import { AnswerColumn } from "./answer_column.js";
import { EMPTY, SAMPLING, makeBody, readModel, readWritten } from "../chat_form.js";
import { markDifferences } from "../difference.js";
import { ErrorNotice, Panel, formatTime, useLoad } from "../ui.js";
import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact.js";

// A browser opens six connections to a server. More requests would wait for each other, and their times would be wrong.
const MAX_MODELS = 4;
const NUM_CHOSEN = 3;
const REDRAW_MS = 40;
const MAX_RUNS = 10;
const SHOWN_PROMPT = 80;
const FORMATS = { text: "text", json_object: "a JSON object", json_schema: "JSON of a schema" };
const TOOLS_EXAMPLE = '[{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", '
  + '"properties": {"city": {"type": "string"}}}}}]';
const SCHEMA_EXAMPLE = '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}';

export function View() {
  const models = useLoad(async (signal) => (await call("v1/models?limit=1000", { signal })).data);
  const [chosen, setChosen] = useState(null);
  const [wanted, setWanted] = useState("");
  const [refused, setRefused] = useState(null);
  const [form, setForm] = useState(EMPTY);
  const [answers, setAnswers] = useState([]);
  const [runs, setRuns] = useState(() => recall("runs") ?? []);
  const [isMarking, setMarking] = useState(true);
  const [, setRound] = useState(0);
  const stop = useRef(null);
  useEffect(() => () => stop.current?.abort(), []);

  const names = chosen ?? suggest(models.value ?? []);
  const written = readWritten(form);
  const isRunning = answers.some((one) => one.isActive);
  const shown = names.map((name) => answers.find((one) => one.name === name));
  const complete = isRunning ? [] : shown.filter((one) => one?.state === "done");
  const marked = useMemo(() => (complete.length > 1 ? markDifferences(complete.map((one) => one.text)) : null),
    [complete.map((one) => one.text).join("\0")]);
  const partsOf = (answer) => (isMarking && marked?.[complete.indexOf(answer)]) || null;
  const read = (name) => ((models.value ?? []).some((one) => one.id === name) ? { model: name } : readModel(name));
  const bodyOf = (name) => makeBody(read(name), form, written);
  const add = () => {
    const name = wanted.trim();
    const { problem = null } = read(name);
    setRefused(problem);
    if (problem) return;
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
    const started = names.map((name) => new Answer(name, bodyOf(name), redraw));
    setAnswers(started);
    const key = currentKey();
    await Promise.all(started.map((one) => one.run(control.signal)));
    // Not for the key of another session.
    if (currentKey() === key) setRuns(keepRun({ time: Date.now() / 1000, names, form, answers: started }));
  }
  function showRun(one) {
    if (isRunning) return;
    setChosen(one.names);
    setForm(one.form);
    setAnswers(one.answers.map(Answer.restore));
  }
  const set = (field) => (event) => setForm({ ...form, [field]: event.target.value });
  const submitByKey = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) event.target.form.requestSubmit();
  };

  return html`
    <${ErrorNotice} error=${models.error} />
    <div class="playground">
      <${Panel} title="Prompt">
        <form onSubmit=${run} onKeyDown=${submitByKey} onInvalidCapture=${reveal}>
          <fieldset><legend>Models</legend>
            <ul class="chips">
              ${names.map((name) => html`<li key=${name}><span class="name">${name}</span>
                <button type="button" aria-label=${`Remove ${name}`}
                  onClick=${() => setChosen(names.filter((one) => one !== name))}>×</button></li>`)}
            </ul>
            ${names.length < MAX_MODELS && html`<span class="fields">
              <input list="models" value=${wanted} aria-label="Model to add" placeholder="name, name@3 or name@alias"
                aria-describedby="model-note"
                onInput=${(event) => setWanted(event.target.value)} autocomplete="off" spellcheck=${false}
                onKeyDown=${(event) => {
                  if (event.key === "Enter" && wanted.trim() !== "") { event.preventDefault(); event.stopPropagation(); add(); }
                }} />
              <button type="button" onClick=${add}>Add</button></span>`}
            <datalist id="models">${(models.value ?? []).map((one) => html`<option key=${one.id} value=${one.id}></option>`)}
            </datalist>
            ${refused && html`<p class="wrong" role="alert">${refused}</p>`}
            <p class="note" id="model-note">${names.length < MAX_MODELS
              ? html`Up to ${MAX_MODELS} models at the same time. <code>a*0.8 + b</code> combines adapters.`
              : `These are the ${MAX_MODELS} models that can answer at the same time.`}</p>
          </fieldset>
          <label>System <textarea rows="2" value=${form.system} onInput=${set("system")}
            placeholder="optional"></textarea></label>
          <label>User <textarea rows="4" value=${form.user} onInput=${set("user")} required></textarea></label>
          <div class="buttons">
            <button class="primary" aria-disabled=${isRunning || names.length === 0} title="Ctrl+Enter">Send</button>
            <button type="button" aria-disabled=${!isRunning} onClick=${() => stop.current?.abort()}>Stop</button>
          </div>
          <${Options} title="Sampling" now=${describeSampling(form)}>
            <div class="field-grid">
              ${SAMPLING.map(({ field, title, step }) => html`
                <label key=${field}>${title} <input type="number" step=${step} value=${form[field]} placeholder="default"
                  onInput=${set(field)} /></label>`)}
              <label>Stop at <input value=${form.stop} onInput=${set("stop")} placeholder="no text" autocomplete="off" /></label>
            </div>
          </${Options}>
          <${Options} title="Tools" now=${written.tools.value?.map((one) => one.function?.name).filter(Boolean).join(", ")}>
            <${JsonField} label="Tools, as in a chat request" value=${form.tools} onInput=${set("tools")} problem=${written.tools.problem}
              placeholder=${TOOLS_EXAMPLE} />
          </${Options}>
          <${Options} title="Form of the answer" now=${FORMATS[form.format]}>
            <label>The answer is <select value=${form.format} onChange=${set("format")}>
              ${Object.entries(FORMATS).map(([id, title]) => html`<option key=${id} value=${id}>${title}</option>`)}</select></label>
            ${form.format === "json_schema" && html`<${JsonField} label="JSON schema" value=${form.schema} onInput=${set("schema")}
              problem=${written.schema.problem} placeholder=${SCHEMA_EXAMPLE} />`}
          </${Options}>
        </form>
        ${runs.length > 0 && html`<${Options} title="Last runs" now=${runs.length}>
          <ul class="plain">${runs.map((one) => html`<li key=${one.time}>
            <button class="run" aria-disabled=${isRunning} onClick=${() => showRun(one)}>${shorten(one.form.user)}
              <small>${one.names.join(", ")} · ${formatTime(one.time)}</small></button></li>`)}</ul>
        </${Options}>`}
      </${Panel}>
      <div>
        ${names.length > 1 && html`<label class="check"><input type="checkbox" checked=${isMarking}
          onChange=${(event) => setMarking(event.target.checked)} /> Mark what differs from the first answer</label>`}
        <div class="answers">
          ${names.map((name, at) => html`<${AnswerColumn} key=${name} name=${name} body=${bodyOf(name)} answer=${shown[at]}
            parts=${partsOf(shown[at])} isFirst=${shown[at] === complete[0]} />`)}
          ${names.length === 0 && models.value && html`<p class="empty">Add a model to compare answers.</p>`}
        </div>
      </div>
    </div>`;
}

// Fields that are rarely needed. `now` says what they are set to.
const Options = ({ title, now, children }) => html`
  <details class="options"><summary>${title} ${now && html`<small>${now}</small>`}</summary>${children}</details>`;

// A field for JSON, with what is wrong with it. The browser sends no form with such a field.
function JsonField({ label, problem, ...field }) {
  const id = `problem-${label}`.replaceAll(/\W/g, "-");
  return html`
    <label>${label} <textarea rows="6" spellcheck=${false} autocomplete="off" ...${field} aria-invalid=${problem ? "true" : undefined}
      aria-describedby=${problem ? id : undefined} ref=${(element) => element?.setCustomValidity(problem ?? "")}></textarea></label>
    ${problem && html`<p class="wrong" id=${id}>${problem}</p>`}`;
}

// Opens the closed part of the form that has an invalid field, so that the browser can show it.
function reveal(event) {
  const part = event.target.closest("details");
  if (part) part.open = true;
}

const describeSampling = (form) => [
  ...SAMPLING.filter(({ field }) => form[field] !== "").map(({ field, title }) => `${title.toLowerCase()} ${form[field]}`),
  ...form.stop === "" ? [] : [`stop at "${form.stop}"`],
].join(", ");

const shorten = (text) => (text.length > SHOWN_PROMPT ? `${text.slice(0, SHOWN_PROMPT)} …` : text);

// Keeps the last runs in this tab, and as many as there is room for. Returns them, the newest first.
function keepRun(run) {
  let runs = [run, ...recall("runs") ?? []].slice(0, MAX_RUNS);
  while (runs.length > 0 && !keep("runs", runs)) runs = runs.slice(0, -1);
  return runs;
}

const suggest = (models) => {
  const base = models.find((one) => one.parent === null);
  const adapters = models.filter((one) => one.parent !== null && !one.id.includes("@"));
  return [...base ? [base] : [], ...adapters].slice(0, NUM_CHOSEN).map((one) => one.id);
};
