// Copying text to the clipboard.

import { html, useEffect, useState } from "./vendor/preact.js";

const NOTE_MS = 2000;

// `text` is the text, or a function that returns it.
export function CopyButton({ text, label = "Copy", title }) {
  const [note, setNote] = useState(null);
  useEffect(() => {
    if (note === null) return undefined;
    const timer = setTimeout(() => setNote(null), NOTE_MS);
    return () => clearTimeout(timer);
  }, [note]);
  const copy = async () => setNote(await write(typeof text === "function" ? text() : text) ? "Copied" : "Copy failed");
  return html`<button type="button" onClick=${copy} title=${title}>
    ${note ?? label}<span class="hidden" role="status">${note}</span></button>`;
}

// Returns whether the text was copied. Browsers have navigator.clipboard only for HTTPS and for the own machine.
async function write(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = document.createElement("textarea");
    field.value = text;
    // Within an open dialog, since elements outside it cannot get the focus.
    const parent = document.querySelector("dialog[open]") ?? document.body;
    const focused = document.activeElement;
    parent.append(field);
    field.select();
    const isCopied = document.execCommand("copy");
    field.remove();
    focused?.focus();
    return isCopied;
  }
}
