// The answer of one model in the playground, with its timing and with what differs from the first answer.

import { CopyButton } from "../copy.js";
import { countWords } from "../difference.js";
import { writeCurl, writePython } from "../snippets.js";
import { ErrorNotice, Figure, formatNumber, formatSeconds } from "../ui.js";
import { html } from "../vendor/preact.js";

const STATES = { idle: "not sent yet", waiting: "waiting for the first token", streaming: "streaming", done: "complete",
  stopped: "stopped", failed: "failed" };

// JSON of the model with line breaks, or the text as it is.
function indent(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

const Marked = ([text, differs]) => (differs ? html`<mark>${text.trimEnd()}</mark>${text.slice(text.trimEnd().length)}` : text);

function describeDifference(parts, isFirst) {
  const count = countWords(parts);
  if (isFirst) return count === 0 ? "" : "Marked: words that no other answer has here.";
  return count === 0 ? "No word that the first answer lacks." : `${count} ${count === 1 ? "word" : "words"} that the first answer lacks.`;
}

// parts: the text with what differs, as from `markDifferences`, or null.
export function AnswerColumn({ name, body, answer, parts, isFirst }) {
  const state = answer?.state ?? "idle";
  return html`
    <section class="panel answer" aria-label=${`Answer of ${name}`}>
      <header><h2 class="name">${name}</h2><span class="tag">${STATES[state]}</span></header>
      <${ErrorNotice} error=${answer?.error} />
      ${answer?.reasoning && html`<p class="text reasoning">${answer.reasoning}</p>`}
      ${answer?.text
        ? html`<p class="text">${parts ? parts.map(Marked) : answer.text}</p>
          ${parts && html`<p class="note">${describeDifference(parts, isFirst)}</p>`}`
        : state === "done" && answer.calls.length === 0 && html`<p class="empty">The answer has no text.</p>`}
      ${answer?.calls.length > 0 && html`<ul class="plain" aria-label="Tool calls">${answer.calls.map((one, at) => html`
        <li key=${at}>calls <code>${one.name}</code><pre>${indent(one.arguments)}</pre></li>`)}</ul>`}
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
      ${body && html`<span class="row-actions">
        <${CopyButton} label="Copy as curl" text=${() => writeCurl(body)} />
        <${CopyButton} label="Copy as Python" text=${() => writePython(body)} />
      </span>`}
    </section>`;
}
