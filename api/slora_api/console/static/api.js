// Calls of the API with the key of the session. The key is in memory and in the tab's sessionStorage, never in a cookie
// or in a URL that is sent.

// Everything in sessionStorage that begins so belongs to the session of a key, and ends with it.
const STORED = "slora.";
const STORED_KEY = `${STORED}key`;
const RETRY_MS = 1000;

// All paths are relative to the page, so that the console works behind a proxy that adds a prefix.
let key = sessionStorage.getItem(STORED_KEY);
let isOnline = true;
const listeners = { signout: new Set(), online: new Set() };

// An error that the server has answered. `code` is the API's code, `reasons` the rules that a refused adapter breaks,
// `retryAfterS` when a retry may succeed, or null.
export class ApiError extends Error {
  constructor(status, error, retryAfterS = null) {
    super(error.message);
    this.retryAfterS = retryAfterS;
    this.status = status;
    this.code = error.code;
    this.param = error.param;
    this.reasons = error.reasons ?? [];
  }
}

// The server did not answer.
export class Unreachable extends Error {
  constructor() {
    super("The server does not answer.");
  }
}

export const hasKey = () => key !== null;
export const currentKey = () => key;

export function setKey(secret) {
  forget();
  key = secret;
  sessionStorage.setItem(STORED_KEY, secret);
}

function forget() {
  key = null;
  for (const name of Object.keys(sessionStorage)) if (name.startsWith(STORED)) sessionStorage.removeItem(name);
}

// Forgets the key and what was kept for it. `reason` is shown on the page of the sign-in.
export function signOut(reason = null) {
  forget();
  for (const listener of listeners.signout) listener(reason);
}

// Keeps a value in this tab until the session ends. Returns false if there is no room for it.
export function keep(name, value) {
  try {
    sessionStorage.setItem(STORED + name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

// What was kept, or null.
export const recall = (name) => parse(sessionStorage.getItem(STORED + name)) ?? null;

// Calls `listener(reason)` when the session ends. Returns a function that stops that.
export const onSignOut = (listener) => listen("signout", listener);

// Calls `listener(isOnline)` when the server stops answering, and when it answers again.
export const onOnline = (listener) => listen("online", listener);

// Sends a request and returns the JSON of the answer. Throws ApiError or Unreachable.
export async function call(path, { method = "GET", body, signal } = {}) {
  const response = await send(path, { method, body, signal });
  return response.status === 204 ? null : response.json();
}

// Sends a request and yields the data of each server-sent event, until the stream ends. Throws ApiError for
// an event with an error. `onHeaders(headers)` gets the headers of the answer.
export async function* stream(path, { method = "GET", body, signal, onHeaders = () => {} } = {}) {
  const response = await send(path, { method, body, signal });
  onHeaders(response.headers);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reach(reader.read(), signal);
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data === "" || data === "[DONE]") continue;
      const event = JSON.parse(data);
      if (event?.error) throw refusal(event.error.code === "invalid_api_key" ? 401 : 200, event.error);
      yield event;
    }
  }
}

// Uploads a form with POST. `onProgress(fraction)` is called while it is sent. Returns the JSON of the answer.
export function upload(path, form, { onProgress = () => {}, signal } = {}) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", path);
    request.setRequestHeader("Authorization", `Bearer ${key}`);
    request.upload.onprogress = (event) => event.lengthComputable && onProgress(event.loaded / event.total);
    request.onload = () => {
      setOnline(true);
      const answer = parse(request.responseText);
      if (request.status < 300) resolve(answer);
      else reject(refusal(request.status, answer?.error, request.getResponseHeader("Retry-After")));
    };
    request.onerror = () => {
      setOnline(false);
      reject(new Unreachable());
    };
    request.onabort = () => reject(new DOMException("The upload was cancelled.", "AbortError"));
    signal?.addEventListener("abort", () => request.abort());
    request.send(form);
  });
}

// Follows a stream for as long as the session lasts, and connects again whenever it ends. `onEvent` gets each event.
export async function follow(path, onEvent, signal) {
  while (!signal.aborted && hasKey()) {
    try {
      for await (const event of stream(path, { signal })) onEvent(event);
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof ApiError && error.status < 500 && error.status !== 429 && error.status !== 200) throw error;
    }
    await pause(RETRY_MS);
  }
}

export const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

async function send(path, { method, body, signal }) {
  const headers = { Authorization: `Bearer ${key}` };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const options = { method, headers, signal, cache: "no-store", credentials: "omit" };
  if (body !== undefined) options.body = JSON.stringify(body);
  const response = await reach(fetch(path, options), signal);
  if (response.ok) return response;
  throw refusal(response.status, parse(await response.text())?.error, response.headers.get("Retry-After"));
}

// Awaits an answer of the server and notes whether it came.
async function reach(promise, signal) {
  try {
    const answer = await promise;
    setOnline(true);
    return answer;
  } catch (error) {
    if (signal?.aborted) throw error;
    setOnline(false);
    throw new Unreachable();
  }
}

// Makes the error of an answer. It ends the session if the key is no longer accepted.
function refusal(status, error, retryAfter = null) {
  error ??= { message: `The server answered with status ${status}.`, code: null };
  if (key !== null && status === 401) signOut("The server no longer accepts this key. It was revoked or has expired.");
  if (key !== null && error.code === "tenant_suspended") signOut(error.message);
  return new ApiError(status, error, retryAfter === null ? null : Number(retryAfter));
}

function setOnline(value) {
  if (isOnline === value) return;
  isOnline = value;
  for (const listener of listeners.online) listener(value);
}

function listen(kind, listener) {
  listeners[kind].add(listener);
  return () => listeners[kind].delete(listener);
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}
