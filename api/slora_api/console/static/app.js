// The shell of the console: sign-in, navigation, and the state of the connection.

import { call, hasKey, onOnline, onSignOut, pause, setKey, signOut, ApiError } from "./api.js";
import { Notice, useWidth } from "./ui.js";
import { html, render, useEffect, useRef, useState } from "./vendor/preact.js";

// A view needs one of its scopes. Its module exports `View`, a component that gets the key's description as `me`.
const VIEWS = [
  { id: "health", title: "Health", scopes: ["admin"], load: () => import("./views/health.js") },
  { id: "pool", title: "Pool", scopes: ["usage:read", "admin"], load: () => import("./views/pool.js") },
  { id: "traffic", title: "Traffic", scopes: ["usage:read", "admin"], load: () => import("./views/traffic.js") },
  { id: "adapters", title: "Adapters", scopes: ["adapters:read", "adapters:write", "admin"],
    load: () => import("./views/adapters.js") },
  { id: "playground", title: "Playground", scopes: ["inference"], load: () => import("./views/playground.js") },
  { id: "usage", title: "Usage", scopes: ["usage:read"], load: () => import("./views/usage.js") },
  { id: "tenants", title: "Tenants", scopes: ["admin"], load: () => import("./views/tenants.js") },
  { id: "audit", title: "Audit log", scopes: ["admin"], load: () => import("./views/audit.js") },
  { id: "key", title: "Key", scopes: null, load: () => import("./views/key.js") },
];
// How often the key is checked while a view makes no request.
const CHECK_MS = 15_000;

const maySee = (view, me) => view.scopes === null || view.scopes.some((scope) => me.scopes.includes(scope));

// Takes a key out of the URL's fragment, which a browser sends to no server. The key is removed from the address and
// from the history at once.
function takeKeyFromAddress() {
  const found = /^#key=([^&]+)/.exec(location.hash);
  if (!found) return false;
  history.replaceState(null, "", location.pathname + location.search);
  setKey(decodeURIComponent(found[1]));
  return true;
}

// How long the operator's key is valid that a sign-in link is exchanged for.
const SIGN_IN_S = 12 * 3600;

// Takes the key of a sign-in link out of the URL's fragment, and exchanges it for another key, which ends the first one.
// So the link works once. Returns why the link is refused, or null.
async function useLinkInAddress() {
  const found = /^#sign-in=(slora_([0-9A-Za-z]+)_[0-9A-Za-z_]+)$/.exec(location.hash);
  if (!found) return null;
  history.replaceState(null, "", location.pathname + location.search);
  setKey(found[1]);
  try {
    const link = await call("v1/me");
    const rotated = await call(`admin/keys/${found[2]}/rotate`, {
      method: "POST", body: { overlap_seconds: 0, expires_at: link.created + SIGN_IN_S },
    });
    setKey(rotated.key);
    return null;
  } catch (error) {
    signOut();
    return error instanceof ApiError && error.status < 500
      ? "This link was used before, or is older than five minutes. Sign in with the admin key, or restart the server."
      : error.message;
  }
}

const viewInAddress = () => location.hash.replace(/^#\//, "").split("/")[0];

function SignIn({ reason, onKey }) {
  const [isBusy, setBusy] = useState(false);
  const [error, setError] = useState(null);
  async function submit(event) {
    event.preventDefault();
    setBusy(true);
    setError(null);
    const field = event.target.elements.key;
    const refused = await onKey(field.value.trim());
    setBusy(false);
    if (refused) {
      setError(refused);
      field.focus();
      field.select();
    }
  }
  return html`
    <main class="sign-in" id="main">
      <form onSubmit=${submit}>
        <h1><img src="console/icon.svg" alt="" width="32" height="32" /> slora console</h1>
        ${reason && !error && html`<${Notice} kind="warning">${reason}</${Notice}>`}
        ${error && html`<${Notice} kind="error">${error}</${Notice}>`}
        <label for="key">API key or admin key</label>
        <input id="key" name="key" type="password" autocomplete="off" spellcheck=${false} required autofocus
          aria-describedby="key-note" />
        <p id="key-note" class="note">The key stays in this tab. It is sent only to this server.</p>
        <button class="primary" disabled=${isBusy}>${isBusy ? "Signing in …" : "Sign in"}</button>
        <p class="note"><a href="docs">API reference</a></p>
      </form>
    </main>`;
}

// The links of the views. On a narrow screen they scroll, and an arrow at an edge shows that there are more.
function Tabs({ views, current }) {
  const element = useRef(null);
  const width = useWidth(element);
  const [classes, setClasses] = useState("tabs");
  const look = () => {
    const { scrollLeft, scrollWidth, clientWidth } = element.current;
    const isCut = { before: scrollLeft > 1, after: scrollLeft + clientWidth < scrollWidth - 1 };
    setClasses(["tabs", ...Object.keys(isCut).filter((side) => isCut[side])].join(" "));
  };
  useEffect(() => {
    element.current.querySelector("[aria-current]").scrollIntoView({ block: "nearest", inline: "nearest" });
    look();
  }, [current.id, width]);
  return html`
    <div class=${classes}>
      <nav aria-label="Views" ref=${element} onScroll=${look}>
        ${views.map((one) => html`
          <a key=${one.id} href="#/${one.id}" aria-current=${one === current ? "page" : undefined}>${one.title}</a>`)}
      </nav>
    </div>`;
}

function Shell({ me, isOnline }) {
  const views = VIEWS.filter((view) => maySee(view, me));
  const [id, setId] = useState(viewInAddress());
  const [loaded, setLoaded] = useState(null);
  const [failure, setFailure] = useState(null);
  const heading = useRef(null);
  const isFirst = useRef(true);
  const view = views.find((one) => one.id === id) ?? views[0];

  useEffect(() => {
    const follow = () => setId(viewInAddress());
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  useEffect(() => {
    let isCurrent = true;
    document.title = `${view.title} · slora console`;
    setFailure(null);
    view.load().then(
      (module) => isCurrent && setLoaded({ id: view.id, View: module.View }),
      () => isCurrent && setFailure("This view could not be loaded. Reload the page when the server answers again."),
    );
    // A screen reader announces the new view. The first one is announced with the page.
    if (!isFirst.current) heading.current?.focus();
    isFirst.current = false;
    return () => (isCurrent = false);
  }, [view.id]);

  return html`
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); heading.current?.focus(); }}>
      Skip to the content</a>
    <header class="bar">
      <span class="brand"><img src="console/icon.svg" alt="" width="24" height="24" /> slora</span>
      <${Tabs} views=${views} current=${view} />
      <span class="who"><span title="The tenant of the key">${me.tenant ?? "operator"}</span>
        <button onClick=${() => signOut()}>Sign out</button></span>
    </header>
    ${!isOnline && html`<div class="page-notice"><${Notice} kind="warning">
      The server does not answer. The console connects again by itself.</${Notice}></div>`}
    <main id="main">
      <h1 tabindex="-1" ref=${heading}>${view.title}</h1>
      ${failure && html`<${Notice} kind="error">${failure}</${Notice}>`}
      ${loaded?.id === view.id && html`<${loaded.View} me=${me} key=${me.key_id} />`}
    </main>`;
}

function App({ refused }) {
  const [me, setMe] = useState(null);
  const [reason, setReason] = useState(refused);
  const [isOnline, setOnline] = useState(true);
  const [isSigningIn, setSigningIn] = useState(hasKey());

  // Signs in with the stored key. While the server does not answer, it tries again.
  async function resume() {
    setSigningIn(true);
    while (hasKey()) {
      try {
        setMe(await call("v1/me"));
        break;
      } catch (error) {
        if (error instanceof ApiError && error.status < 500) {
          if (hasKey()) signOut(error.message);
          break;
        }
        await pause(1000);
      }
    }
    setSigningIn(false);
  }

  // Returns why the key is refused, or null.
  async function useNewKey(secret) {
    if (!/^[\x21-\x7e]+$/.test(secret)) return "A key has no spaces, and only letters, digits and signs of ASCII.";
    setKey(secret);
    try {
      setMe(await call("v1/me"));
      setReason(null);
      return null;
    } catch (error) {
      signOut();
      if (error.status === 401) return "The server does not accept this key. Check that it is complete and not revoked.";
      return error.message;
    }
  }

  useEffect(() => {
    const stops = [
      onSignOut((why) => {
        setMe(null);
        setReason(why);
        document.title = "slora console";
        history.replaceState(null, "", location.pathname + location.search);
      }),
      onOnline(setOnline),
    ];
    const takeKey = () => {
      if (location.hash.startsWith("#sign-in=")) location.reload();
      else if (takeKeyFromAddress()) resume();
    };
    addEventListener("hashchange", takeKey);
    // Not `hasKey()`: the user may have submitted a key before this effect runs.
    if (isSigningIn) resume();
    return () => {
      stops.forEach((stop) => stop());
      removeEventListener("hashchange", takeKey);
    };
  }, []);
  useEffect(() => {
    if (me === null) return undefined;
    const timer = setInterval(() => call("v1/me").catch(() => {}), isOnline ? CHECK_MS : 1000);
    return () => clearInterval(timer);
  }, [me, isOnline]);

  if (me !== null) return html`<${Shell} me=${me} isOnline=${isOnline} key=${me.key_id} />`;
  if (!isSigningIn) return html`<${SignIn} reason=${reason} onKey=${useNewKey} />`;
  return html`<main class="sign-in" id="main"><${Notice}>
    ${isOnline ? "Signing in …" : "The server does not answer. The console tries again until it does."}</${Notice}></main>`;
}

takeKeyFromAddress();
const refused = await useLinkInAddress();
render(html`<${App} refused=${refused} />`, document.getElementById("app"));
