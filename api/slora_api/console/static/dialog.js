// A window in front of the page. The browser keeps the focus inside and gives it back at the end.

import { ErrorNotice, useAction } from "./ui.js";
import { html, useLayoutEffect, useRef, useState } from "./vendor/preact.js";

let numDialogs = 0;

// `onClose` is called when the user closes the window, also with Escape.
export function Dialog({ title, onClose, children }) {
  const element = useRef(null);
  const [id] = useState(() => `dialog-${++numDialogs}`);
  useLayoutEffect(() => {
    const shown = element.current;
    shown.showModal();
    return () => shown.close();
  }, []);
  return html`
    <dialog ref=${element} aria-labelledby=${id} onCancel=${onClose}>
      <h2 id=${id}>${title}</h2>
      ${children}
    </dialog>`;
}

// Asks before `act()` changes something. The window closes when `act()` has succeeded, and shows its error otherwise.
// typed: a text that the user has to repeat first.
export function Confirm({ title, children, verb, act, onClose, typed = null }) {
  const { run, isBusy, error } = useAction();
  const [text, setText] = useState("");
  const isAllowed = typed === null || text === typed;
  async function submit(event) {
    event.preventDefault();
    if (isAllowed && await run(act)) onClose();
  }
  return html`
    <${Dialog} title=${title} onClose=${onClose}>
      <form onSubmit=${submit}>
        ${children}
        ${typed !== null && html`
          <label>Type <code>${typed}</code> to confirm
            <input value=${text} onInput=${(event) => setText(event.target.value)} autocomplete="off" spellcheck=${false} />
          </label>`}
        <${ErrorNotice} error=${error} />
        <${Buttons}>
          <button type="button" onClick=${onClose}>Cancel</button>
          <button class="danger" disabled=${!isAllowed} aria-disabled=${isBusy}>${verb}</button>
        </${Buttons}>
      </form>
    </${Dialog}>`;
}

// A form in a window. `send()` sends it; the window closes when it has succeeded.
export function FormDialog({ title, children, verb, send, onClose, isValid = true }) {
  const { run, isBusy, error } = useAction();
  async function submit(event) {
    event.preventDefault();
    if (isValid && await run(() => send(new FormData(event.target)))) onClose();
  }
  return html`
    <${Dialog} title=${title} onClose=${onClose}>
      <form onSubmit=${submit}>
        ${children}
        <${ErrorNotice} error=${error} />
        <${Buttons}>
          <button type="button" onClick=${onClose}>Cancel</button>
          <button class="primary" disabled=${!isValid} aria-disabled=${isBusy}>${verb}</button>
        </${Buttons}>
      </form>
    </${Dialog}>`;
}

export const Buttons = ({ children }) => html`<div class="buttons">${children}</div>`;
