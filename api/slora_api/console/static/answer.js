// The streamed answer of one model, with its timing as this browser sees it. Times are in seconds.

import { stream } from "./api.js";

// Chunks that arrive within this time count as one, because a busy server or browser passes several on at once.
const BURST_S = 0.005;

export class Answer {
  // name: who answers, as the page shows it. body: the body of the request. `onChange()` is called whenever a part of the answer has changed.
  constructor(name, body, onChange) {
    this.name = name;
    this.state = "waiting";
    this.text = "";
    this.reasoning = "";
    this.calls = []; // of tools: {name, arguments}, both as texts
    this.error = null;
    this.usage = null;
    this.finishReason = null;
    this.version = null;
    this.firstTokenS = null;
    this.totalS = null;
    this._body = { ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
    this._onChange = onChange;
    this._lastTokenS = null;
    this._numFirst = 0;
  }

  // The answer that `toJSON` has described. It sends nothing.
  static restore(saved) {
    return Object.assign(Object.create(Answer.prototype), saved);
  }

  toJSON() {
    const { _body, _onChange, error, ...others } = this;
    return { ...others, error: error && { message: error.message, reasons: error.reasons } };
  }

  get isActive() {
    return this.state === "waiting" || this.state === "streaming";
  }

  // The pace of the tokens that came after the first ones, or null if all came at once.
  get tokensPerS() {
    const numTokens = (this.usage?.completion_tokens ?? 0) - this._numFirst;
    return this._lastTokenS > this.firstTokenS + BURST_S ? numTokens / (this._lastTokenS - this.firstTokenS) : null;
  }

  // Sends the request and follows the answer to its end. `signal` stops it. Never throws.
  async run(signal) {
    const startedMs = performance.now();
    const elapsed = () => (performance.now() - startedMs) / 1000;
    const onHeaders = (headers) => (this.version = headers.get("x-slora-adapter"));
    try {
      const events = stream("v1/chat/completions", { method: "POST", body: this._body, signal, onHeaders });
      for await (const event of events) this._take(event, elapsed());
      this.state = "done";
    } catch (error) {
      this.state = signal.aborted ? "stopped" : "failed";
      if (!signal.aborted) this.error = error;
    }
    this.totalS = elapsed();
    this._onChange();
  }

  _take(event, nowS) {
    const choice = event.choices?.[0];
    this.usage = event.usage ?? this.usage;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice?.delta ?? {};
    if (content || reasoning || calls) {
      this.text += content ?? "";
      this.reasoning += reasoning ?? "";
      for (const { index, function: part } of calls ?? []) {
        const call = (this.calls[index] ??= { name: "", arguments: "" });
        call.name += part.name ?? "";
        call.arguments += part.arguments ?? "";
      }
      this.state = "streaming";
      this.firstTokenS ??= nowS;
      this._lastTokenS = nowS;
      if (nowS <= this.firstTokenS + BURST_S) this._numFirst = this.usage?.completion_tokens ?? 0;
    }
    this.finishReason = choice?.finish_reason ?? this.finishReason;
    this._onChange();
  }
}
