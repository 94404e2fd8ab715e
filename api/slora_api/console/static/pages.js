// Lists of which the server answers one page at a time.

import { call } from "./api.js";
import { useLoad } from "./ui.js";
import { html, useState } from "./vendor/preact.js";

// Loads a page of the list at `route`, which may have parameters. Another route begins with its first page. Returns
// {value, error, reload, toFirst, pager}: `pager` are the properties of `Pager`.
export function usePages(route, limit) {
  // The items after which the pages before this one ended.
  const [turned, setTurned] = useState({ route, ends: [null] });
  const ends = turned.route === route ? turned.ends : [null];
  const turn = (to) => setTurned({ route, ends: to });
  const after = ends.at(-1);
  const query = new URLSearchParams({ limit, ...after !== null && { after } });
  const address = `${route}${route.includes("?") ? "&" : "?"}${query}`;
  const list = useLoad((signal) => call(address, { signal }), [address]);
  const pager = {
    isFirst: ends.length === 1,
    hasMore: list.value?.has_more ?? false,
    onBack: () => turn(ends.slice(0, -1)),
    onNext: () => turn([...ends, list.value.last_id]),
  };
  return { ...list, toFirst: () => turn([null]), pager };
}

// Buttons that turn the pages of a list. Nothing if there is only one page.
export const Pager = ({ isFirst, hasMore, onBack, onNext, back = "Previous", next = "Next" }) =>
  (!isFirst || hasMore) && html`
    <div class="buttons">
      <button disabled=${isFirst} onClick=${onBack}>${back}</button>
      <button disabled=${!hasMore} onClick=${onNext}>${next}</button>
    </div>`;
