// The status page: a chat with the server that sent it, and what the event feed tells.
// Text from the server is only ever set as text, never as markup.

import { ask, byId, key, WrongKey } from "./api.js";
import { meet } from "./chat.js";
import { readFrames } from "./frames.js";
import { feedPath, forgetStatus, showState, takeStatus } from "./status.js";

const FIRST_RETRY = 1000, LAST_RETRY = 30000; // milliseconds

// --- The key -----------------------------------------------------------------------------------

key.onWanted = (wrong) => {
  byId("key-form").hidden = false;
  byId("key-hint").textContent = wrong
    ? "The server refused this key."
    : "The server wants a key. It is kept in this tab only, until the tab is closed.";
  byId("forget-item").hidden = true;
  showState("key needed", "bad");
};

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("key").value.trim();
  if (!/^[\x21-\x7e]+$/.test(text)) {
    byId("key-hint").textContent = "A key has printable ASCII characters only.";
    return;
  }
  key.keep(text);
  byId("key").value = "";
  byId("key-form").hidden = true;
  followFeed();
});

byId("forget").addEventListener("click", () => {
  key.forget();
  followFeed();
});

// --- The event feed ----------------------------------------------------------------------------

let feed = null; // the AbortController of the connection, while there is one
let retry = FIRST_RETRY;
let retryTimer = 0;

async function followFeed() {
  leaveFeed();
  if (document.hidden) return; // nobody looks
  const mine = (feed = new AbortController());
  try {
    const response = await ask(feedPath(), { signal: mine.signal });
    byId("key-form").hidden = true;
    byId("forget-item").hidden = key.get() === null;
    forgetStatus();
    for await (const { name, data } of readFrames(response.body)) {
      retry = FIRST_RETRY;
      const event = JSON.parse(data);
      if (name === "info") meet(event);
      await takeStatus(name, event);
    }
    throw new Error("the server ended the feed");
  } catch (error) {
    if (mine.signal.aborted || error instanceof WrongKey) return;
    mine.abort();
    const wait = retry * (0.75 + Math.random() / 2);
    retry = Math.min(2 * retry, LAST_RETRY);
    showState(`no connection; again in ${Math.ceil(wait / 1000)} s`, "bad");
    retryTimer = setTimeout(followFeed, wait);
  }
}

byId("replica").addEventListener("change", followFeed);

function leaveFeed() {
  clearTimeout(retryTimer);
  feed?.abort();
  feed = null;
}

document.addEventListener("visibilitychange", () => (document.hidden ? leaveFeed() : followFeed()));
addEventListener("pagehide", leaveFeed);
addEventListener("pageshow", (event) => event.persisted && followFeed());

// --- The rest ----------------------------------------------------------------------------------

// Links that want the key are fetched with it, and shown here.
document.addEventListener("click", async (event) => {
  const link = event.target.closest("a[data-view]");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  try {
    const text = await (await ask(link.getAttribute("href"))).text();
    byId("viewer-text").textContent = /^\s*\{/.test(text) ? JSON.stringify(JSON.parse(text), null, 2) : text;
    byId("viewer-title").textContent = link.textContent;
    byId("viewer").showModal();
  } catch (error) {
    if (!(error instanceof WrongKey)) showState(error.message, "bad");
  }
});

const base = new URL(".", location.href).href.replace(/\/$/, "");
byId("endpoint").textContent = `${base}/v1`;
byId("url").textContent = base;
followFeed();
