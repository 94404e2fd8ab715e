// Parts that the views share.

import { html, useCallback, useEffect, useLayoutEffect, useRef, useState } from "./vendor/preact.js";

// A region of a view with a heading. `actions` stands beside the heading.
export const Panel = ({ title, actions, children, wide }) => html`
  <section class=${wide ? "panel wide" : "panel"}>
    <header><h2>${title}</h2>${actions}</header>
    ${children}
  </section>`;

// A message. kind: "info", "good", "warning" or "error"; warnings and errors are read out at once.
export const Notice = ({ kind = "info", children }) => html`
  <p class="notice ${kind}" role=${kind === "error" || kind === "warning" ? "alert" : "status"}>${children}</p>`;

// Why a request failed, with all reasons of the server. Nothing for null.
export const ErrorNotice = ({ error }) => error && html`
  <div class="notice error" role="alert">
    ${error.reasons?.length > 1 ? `There are ${error.reasons.length} reasons for the refusal:` : error.message}
    ${error.retryAfterS ? ` You can try again in ${error.retryAfterS} s.` : ""}
    ${error.reasons?.length > 1 && html`
      <ul>${error.reasons.map((one) => html`<li>${one.message} <code>${one.code}</code></li>`)}</ul>`}
  </div>`;

// One number with its name.
export const Figure = ({ name, value, unit, title }) => html`
  <div class="figure" title=${title}><dt>${name}</dt><dd>${value}${unit && html`<small> ${unit}</small>`}</dd></div>`;

// A table. columns: [{name, cell: row => content, isNumber}]. `rowKey(row)` identifies a row.
export const Table = ({ caption, columns, rows, rowKey, empty = "There is nothing to show." }) => html`
  <div class="table" tabindex="0" role="region" aria-label=${caption}>
    <table>
      <caption class="hidden">${caption}</caption>
      <thead><tr>${columns.map(({ name, isNumber }) => html`
        <th scope="col" class=${isNumber ? "number" : ""}>${name}</th>`)}</tr></thead>
      <tbody>
        ${rows.map((row) => html`<tr key=${rowKey(row)}>${columns.map(({ name, cell, isNumber }) => html`
          <td class=${isNumber ? "number" : ""} data-name=${name}>${cell(row)}</td>`)}</tr>`)}
        ${rows.length === 0 && html`<tr><td colspan=${columns.length} class="empty">${empty}</td></tr>`}
      </tbody>
    </table>
  </div>`;

// Loads a value with `load(signal)` when the view opens, and again after `reload()`. Returns {value, error, reload}.
export function useLoad(load, inputs = []) {
  const [state, setState] = useState({ value: null, error: null });
  const [round, setRound] = useState(0);
  useEffect(() => {
    const stop = new AbortController();
    load(stop.signal).then(
      (value) => stop.signal.aborted || setState({ value, error: null }),
      (error) => stop.signal.aborted || setState(({ value }) => ({ value, error })),
    );
    return () => stop.abort();
  }, [...inputs, round]);
  return { ...state, reload: useCallback(() => setRound((last) => last + 1), []) };
}

// The width of an element in whole pixels, as it is laid out now; 0 before it is.
export function useWidth(element) {
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    observer.observe(element.current);
    return () => observer.disconnect();
  }, []);
  return width;
}

// For requests that change something. `run(act)` awaits `act()`, keeps its error, and returns whether it succeeded. A
// second run while one is in progress does nothing; buttons show that with `aria-disabled`, since a button that is
// disabled loses the focus.
export function useAction() {
  const [state, setState] = useState({ isBusy: false, error: null });
  const isRunning = useRef(false);
  const run = useCallback(async (act) => {
    if (isRunning.current) return false;
    isRunning.current = true;
    setState({ isBusy: true, error: null });
    let error = null;
    try {
      await act();
    } catch (thrown) {
      error = thrown;
    }
    isRunning.current = false;
    setState({ isBusy: false, error });
    return error === null;
  }, []);
  return { ...state, run };
}

// Sorts rows by tenant and adapter, so that they keep their places while their numbers change. Others come last.
export const sortByName = (rows) => {
  const text = ({ tenant, adapter }) => (tenant === null ? "\uffff" : `${tenant} ${adapter ?? ""}`);
  return [...rows].sort((one, other) => (text(one) < text(other) ? -1 : 1));
};

const whole = new Intl.NumberFormat("en");
const rounded = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

export const formatCount = (value) => whole.format(value);
export const formatNumber = (value) => (Math.abs(value) >= 1000 ? whole.format(Math.round(value)) : rounded.format(value));
const percent = new Intl.NumberFormat("en", { maximumFractionDigits: 2 });
export const formatShare = (value) => (value > 0 && value < 0.0001 ? "< 0.01 %" : `${percent.format(value * 100)} %`);

export function formatBytes(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = bytes > 0 ? Math.min(Math.floor(Math.log2(bytes) / 10), units.length - 1) : 0;
  return `${rounded.format(bytes / 1024 ** power)} ${units[power]}`;
}

export function formatSeconds(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  return seconds < 1 ? `${rounded.format(seconds * 1000)} ms` : `${rounded.format(seconds)} s`;
}

// A Unix time in seconds, in the time zone of the browser.
export const formatTime = (seconds) =>
  seconds === null ? "–" : new Date(seconds * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
