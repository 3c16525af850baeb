// The status page: a chat with the server that sent it, and what the event feed tells.
// Text from the server is only ever set as text, never as markup.

import { BlockMap } from "./blocks.js";
import { readFrames } from "./frames.js";

const FIRST_RETRY = 1000, LAST_RETRY = 30000; // milliseconds
const SHOWN_LINES = 20, NEAR_END = 80; // NEAR_END in pixels
const KEY = "appliance-key";
const byId = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en");

const page = { info: null, jobs: new Map(), map: new BlockMap(byId("map")), messages: [], answering: null };

// --- Talking to the server ---------------------------------------------------------------------

class WrongKey extends Error {}

async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.status === 401) {
    wantKey(key !== null);
    throw new WrongKey("the server wants its API key");
  }
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new Error(body?.error?.message ?? `the server answered ${response.status}`);
  }
  return response;
}

function wantKey(wrong) {
  byId("key-form").hidden = false;
  byId("key-hint").textContent = wrong
    ? "The server refused this key."
    : "The server wants a key. It is kept in this tab only, until the tab is closed.";
  byId("forget-item").hidden = true;
  showState("key needed", "bad");
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = byId("key").value.trim();
  if (!/^[\x21-\x7e]+$/.test(key)) {
    byId("key-hint").textContent = "A key has printable ASCII characters only.";
    return;
  }
  sessionStorage.setItem(KEY, key);
  byId("key").value = "";
  byId("key-form").hidden = true;
  follow();
});

byId("forget").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  follow();
});

// --- The event feed ----------------------------------------------------------------------------

let feed = null; // the AbortController of the connection, while there is one
let retryTimer = 0;

async function follow() {
  leave();
  if (document.hidden) return; // nobody looks
  const mine = (feed = new AbortController());
  try {
    const response = await ask("admin/v1/events", { signal: mine.signal });
    byId("key-form").hidden = true;
    byId("forget-item").hidden = sessionStorage.getItem(KEY) === null;
    byId("log").replaceChildren(); // the feed begins with all that is kept
    page.jobs.clear();
    showJobs();
    for await (const { name, data } of readFrames(response.body)) {
      follow.retry = FIRST_RETRY;
      await take(name, JSON.parse(data));
    }
    throw new Error("the server ended the feed");
  } catch (error) {
    if (mine.signal.aborted || error instanceof WrongKey) return;
    mine.abort();
    const wait = follow.retry * (0.75 + Math.random() / 2);
    follow.retry = Math.min(2 * follow.retry, LAST_RETRY);
    showState(`no connection; again in ${Math.ceil(wait / 1000)} s`, "bad");
    retryTimer = setTimeout(follow, wait);
  }
}
follow.retry = FIRST_RETRY;

function leave() {
  clearTimeout(retryTimer);
  feed?.abort();
  feed = null;
}

document.addEventListener("visibilitychange", () => (document.hidden ? leave() : follow()));
addEventListener("pagehide", leave);
addEventListener("pageshow", (event) => event.persisted && follow());

async function take(name, event) {
  if (name === "info") takeInfo(event);
  else if (name === "snapshot") await page.map.take(event);
  else if (name === "delta") page.map.change(event);
  else if (name === "stats") takeStats(event);
  else if (name === "job") takeJob(event);
  else if (name === "log") takeLog(event);
}

function showState(text, kind) {
  byId("state").textContent = text;
  byId("state").className = `state ${kind}`;
}

function takeInfo(info) {
  page.info = info;
  byId("model").textContent = info.model;
  document.title = `${info.model} · Appliance`;
  const limit = byId("limit");
  if (limit.value === limit.defaultValue && info.context_length) {
    limit.value = limit.defaultValue = Math.min(512, Math.floor(info.context_length / 4));
  }
  showState(info.reason ? `${info.state}: ${info.reason}` : info.state, info.state === "ready" ? "ready" : "bad");
}

function takeStats(stats) {
  const { info } = page, { engine } = stats;
  const rows = {
    Model: [info.architecture, info.weight_format].filter(Boolean).join(", "),
    Device: info.device,
    Context: `${number.format(info.context_length)} tokens`,
    "KV cache": `${info.kv_format}, ${number.format(info.num_blocks)} blocks of ${info.block_size}`,
    "KV in host memory": engine.kv_host_capacity
      ? `${number.format(engine.kv_host_blocks)} of ${number.format(engine.kv_host_capacity)} blocks, ${number.format(engine.kv_host_swapped)} swapped` : "",
    Requests: `${stats.requests_running} running, ${stats.requests_waiting} waiting`,
    "Tokens per second": `${rate(stats.prompt_tokens_per_second)} in, ${rate(stats.generation_tokens_per_second)} out`,
    "First token": seconds(stats.time_to_first_token),
    "Between tokens": seconds(stats.inter_token_latency),
    Memory: memory(stats.machine),
    Version: info.version,
  };
  for (const gpu of stats.machine?.gpus ?? []) {
    rows[gpu.name] = [
      gpu.utilization === null ? null : `${Math.round(100 * gpu.utilization)} %`,
      gpu.power_watts === null ? null : `${Math.round(gpu.power_watts)} W`,
      gpu.temperature_celsius === null ? null : `${gpu.temperature_celsius} °C`,
    ].filter(Boolean).join(", ");
  }
  const list = byId("facts");
  list.replaceChildren(...Object.entries(rows).filter(([, value]) => value).flatMap(([term, value]) => {
    const dt = document.createElement("dt"), dd = document.createElement("dd");
    dt.textContent = term;
    dd.textContent = value;
    return [dt, dd];
  }));
  const use = engine.blocks_total ? engine.blocks_active / engine.blocks_total : 0;
  byId("kv").value = use;
  byId("kv-text").textContent = `${(100 * use).toFixed(use < 0.1 ? 1 : 0)} %`;
  const text = `${engine.blocks_active} blocks active, ${engine.blocks_cached} cached, ${engine.blocks_free} free`;
  byId("map").setAttribute("aria-label", `Block map: ${text}`);
}

function takeJob(job) {
  if (job.ended) page.jobs.delete(job.name);
  else page.jobs.set(job.name, job);
  showJobs();
}

function showJobs() {
  byId("jobs").replaceChildren(...[...page.jobs.values()].map((job) => {
    const item = document.createElement("li"), bar = document.createElement("progress");
    if (job.total) bar.value = job.done / job.total; // else it moves to and fro
    bar.setAttribute("aria-label", job.name);
    const facts = [
      job.stage,
      job.total ? `${((100 * job.done) / job.total).toFixed(1)} %` : "",
      job.part,
      job.parts_total ? `${job.parts_done} of ${job.parts_total}` : "",
      job.loss === null ? "" : `loss ${Number(job.loss.toPrecision(3))}`,
      job.seconds_left === null ? "" : `${clock(job.seconds_left)} left`,
    ];
    item.append(job.name, bar, facts.filter(Boolean).join(" · "));
    return item;
  }));
}

function takeLog({ lines }) {
  byId("log-part").hidden = false;
  const list = byId("log");
  for (const line of lines) {
    const item = document.createElement("li");
    item.textContent = `${new Date(1000 * line.time).toLocaleTimeString()} ${line.level.toLowerCase()}: ${line.message}`;
    list.prepend(item);
  }
  while (list.childElementCount > SHOWN_LINES) list.lastElementChild.remove();
}

const rate = (value) => value.toFixed(value < 10 ? 1 : 0);
const seconds = (one) => (one.count ? `${(1000 * one.p50).toFixed(0)} ms, p99 ${(1000 * one.p99).toFixed(0)} ms` : "");
const two = (value) => String(value).padStart(2, "0");
function clock(secondsLeft) {
  const whole = Math.round(secondsLeft), minutes = Math.floor(whole / 60), hours = Math.floor(minutes / 60);
  if (whole < 60) return `${whole} s`;
  return hours ? `${hours}:${two(minutes % 60)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}
const mebibytes = (bytes) => `${number.format(Math.round(bytes / 2 ** 20))} MiB`;
const memory = (machine) => (machine ? `${mebibytes(machine.engine_rss_bytes)} engine, ${mebibytes(machine.api_rss_bytes)} API` : "");

// --- The chat ----------------------------------------------------------------------------------

function bubble(role, text) {
  const element = document.createElement("div");
  element.className = `message ${role}`;
  element.dataset.who = { user: "You", assistant: "Model", error: "Error" }[role];
  element.textContent = text;
  const box = byId("messages");
  box.append(element);
  box.scrollTop = box.scrollHeight;
  return element;
}

// Follow an answer as it grows, unless the person has scrolled up to read.
function grow(element, text) {
  const box = byId("messages");
  const following = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END;
  element.append(text);
  if (following) box.scrollTop = box.scrollHeight;
}

function setAnswering(controller) {
  page.answering = controller;
  byId("send").disabled = controller !== null;
  byId("stop").disabled = controller === null;
  byId("messages").setAttribute("aria-busy", String(controller !== null));
}

async function answer(asked) {
  const controller = new AbortController();
  const { messages } = page; // of this chat: a new one may have begun when the answer ends
  setAnswering(controller);
  byId("figures").textContent = "…";
  const element = bubble("assistant", "");
  const turn = { role: "assistant", content: "" };
  const clock = { begin: performance.now(), first: 0, last: 0 };
  let pieces = 0;
  try {
    const response = await ask("v1/chat/completions", {
      method: "POST",
      signal: controller.signal,
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({
        messages,
        temperature: Number(byId("temperature").value),
        max_tokens: Number(byId("limit").value) || undefined,
        stream: true,
        stream_options: { include_usage: true },
      }),
    });
    for await (const { data } of readFrames(response.body)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const text = chunk.choices[0]?.delta.content;
      if (text) {
        clock.last = performance.now();
        clock.first ||= clock.last;
        turn.content += text;
        grow(element, text);
        pieces++;
        const took = (clock.last - clock.first) / 1000;
        // A piece is mostly one token; the exact figures come with the end.
        if (took > 0.2) byId("figures").textContent = `about ${((pieces - 1) / took).toFixed(0)} tokens/s`;
      }
      if (chunk.usage) showFigures(chunk.usage, clock);
    }
  } catch (error) {
    if (controller.signal.aborted) byId("figures").textContent = "stopped";
    else {
      bubble("error", error.message);
      byId("figures").textContent = "";
    }
  } finally {
    if (turn.content) messages.push(turn);
    else {
      element.remove();
      if (messages === page.messages) takeBack(asked);
    }
    if (messages !== page.messages) byId("figures").textContent = "";
    setAnswering(null);
    grow(element, ""); // the line of figures may have become higher
  }
}

// Nothing came of what was said: it goes back to where it was written.
function takeBack(asked) {
  page.messages.pop();
  asked.remove();
  const prompt = byId("prompt");
  prompt.value = [asked.textContent, prompt.value].filter(Boolean).join("\n");
}

function showFigures(usage, clock) {
  const parts = [`${number.format(usage.completion_tokens)} token${usage.completion_tokens === 1 ? "" : "s"}`];
  const took = (clock.last - clock.first) / 1000;
  if (took > 0 && usage.completion_tokens > 1) parts.push(`${((usage.completion_tokens - 1) / took).toFixed(1)} tokens/s`);
  if (clock.first) parts.push(`first after ${Math.round(clock.first - clock.begin)} ms`);
  const cached = usage.prompt_tokens_details?.cached_tokens;
  if (cached) parts.push(`${cached} of ${usage.prompt_tokens} prompt tokens cached`);
  if (page.info?.context_length) {
    const share = (100 * usage.total_tokens) / page.info.context_length;
    parts.push(`context ${usage.total_tokens} of ${page.info.context_length} (${share.toFixed(0)} %)`);
  }
  byId("figures").textContent = parts.join(" · ");
}

byId("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("prompt").value.trim();
  if (!text || page.answering) return;
  page.messages.push({ role: "user", content: text });
  byId("prompt").value = "";
  answer(bubble("user", text));
});

byId("prompt").addEventListener("keydown", (event) => {
  const touch = matchMedia("(pointer: coarse)").matches; // whose keyboards have no Shift+Enter
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !touch) {
    event.preventDefault();
    byId("chat-form").requestSubmit();
  }
});

byId("stop").addEventListener("click", () => page.answering?.abort());

byId("clear").addEventListener("click", () => {
  page.answering?.abort();
  page.messages = [];
  byId("messages").replaceChildren();
  byId("figures").textContent = "";
  byId("prompt").focus();
});

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
follow();
