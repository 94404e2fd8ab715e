// The part of the page's address behind `#`, such as `#/adapters/greeter`: the view, and what it shows.

import { useEffect, useState } from "./vendor/preact.js";

export const link = (...parts) => `#/${parts.map(encodeURIComponent).join("/")}`;

// Names in paths of the API.
export const path = (strings, ...names) => String.raw({ raw: strings }, ...names.map(encodeURIComponent));

// Returns the part behind the view, or null. The component is rendered again when it changes.
export function useSubject() {
  const [subject, setSubject] = useState(readSubject);
  useEffect(() => {
    const follow = () => setSubject(readSubject());
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  return subject;
}

function readSubject() {
  const part = location.hash.split("/")[2];
  try {
    return part ? decodeURIComponent(part) : null;
  } catch {
    return null; // a broken escape in an address that somebody typed
  }
}
