// The conversation; with a model that has no chat template, the text that it continues.

import { ask, byId, number, Refused } from "./api.js";
import { readFrames } from "./frames.js";
import { Answer } from "./markdown.js";
import * as pictures from "./pictures.js";

const NEAR_END = 80; // pixels
const USUAL_LIMIT = 512; // tokens of an answer
const NO_ROOM = "context_length_exceeded";
const box = byId("messages");

let info = null;
let chats = true;
let turns = []; // { role, content, pictures, element }
let answering = null; // the AbortController of the answer that is written
let following = true; // the end is looked at, so it is kept in sight

// --- What is served -----------------------------------------------------------------------------

export function meet(event) {
  const first = info === null;
  info = event;
  if (first || (info.chats !== chats && turns.length === 0)) setMode(info.chats !== false);
  const limit = byId("limit");
  if (info.context_length) limit.placeholder = Math.min(USUAL_LIMIT, Math.floor(info.context_length / 4));
  byId("temperature").placeholder = info.sampling?.temperature ?? 1;
  box.dataset.hint = chats
    ? `Ask ${info.model} something.`
    : `${info.model} has no chat template: it goes on with a text. Write a beginning.`;
  pictures.meet(chats && info.reads_pictures === true, (why) => (byId("figures").textContent = why));
  showSettings();
}

function setMode(isChat) {
  chats = isChat;
  byId("chat-title").textContent = chats ? "Chat" : "Text";
  byId("clear").textContent = chats ? "New chat" : "New text";
  byId("send").textContent = chats ? "Send" : "Continue";
  byId("prompt").placeholder = chats ? "Say something" : "Write a text that the model goes on with";
  byId("system-part").hidden = !chats;
  box.classList.toggle("one-text", !chats);
}

const limitOf = () => Number(byId("limit").value || byId("limit").placeholder) || undefined;

function showSettings() {
  const temperature = byId("temperature");
  byId("settings-now").textContent = [
    `temperature ${temperature.value || temperature.placeholder}`,
    limitOf() ? `at most ${number.format(limitOf())} tokens` : "",
    chats && byId("system").value.trim() ? "a system prompt" : "",
  ].filter(Boolean).join(" · ");
}

byId("settings").addEventListener("input", showSettings);

// --- What is shown ------------------------------------------------------------------------------

function follow() {
  if (following) box.scrollTop = box.scrollHeight;
}

box.addEventListener("scroll", () => {
  following = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END;
});
new ResizeObserver(follow).observe(box); // the figures below it take more lines or fewer

// Add a turn, with the element that its text goes to.
function show(role, content = "", attached = []) {
  const element = document.createElement(chats || role === "error" ? "div" : "span");
  element.className = `message ${role}`;
  let place = element;
  if (element.tagName === "DIV") {
    place = document.createElement("div");
    place.className = "text";
    const who = document.createElement("div");
    who.className = "who";
    who.textContent = { user: "You", assistant: "Model", error: "Error" }[role];
    element.append(who, ...attached.map(pictures.shown), place);
  }
  place.dir = "auto";
  place.textContent = content;
  box.append(element);
  follow();
  return { role, content, pictures: attached, element, place };
}

function writer(turn) {
  if (chats) return new Answer(turn.place, follow);
  return { append: (text) => (turn.place.append(text), follow()), end: () => {} };
}

// What the model says to itself stands above its answer, folded up.
function think(turn, text) {
  if (!turn.thoughts) {
    const details = document.createElement("details");
    const summary = document.createElement("summary");
    details.className = "thoughts";
    summary.textContent = "Thoughts";
    turn.thoughts = document.createElement("div");
    turn.thoughts.dir = "auto";
    details.append(summary, turn.thoughts);
    turn.place.before(details);
  }
  turn.thoughts.append(text);
  follow();
}

function wordless(turn, reason) {
  if (!turn.thoughts) return "the model ended at once, without a word";
  return reason === "length" ? "cut off while it thought: Settings allow no more" : "the model only thought, without a word";
}

// A finished answer can be copied as it was written.
function finish(turn) {
  if (!chats) return;
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy quiet";
  button.textContent = "Copy";
  turn.element.querySelector(".who").append(button);
}

function setAnswering(controller) {
  answering = controller;
  byId("send").disabled = controller !== null;
  byId("stop").disabled = controller === null;
  byId("again").disabled = controller !== null || turns.at(-1)?.role !== "assistant";
  box.setAttribute("aria-busy", String(controller !== null));
}

function showFigures(usage, clock, reason) {
  const parts = [];
  if (reason === "length") {
    const isFull = usage.total_tokens >= info.context_length;
    if (isFull) parts.push("cut off: the context is full");
    else if (chats) parts.push("cut off: Settings allow no more");
  }
  parts.push(`${number.format(usage.completion_tokens)} token${usage.completion_tokens === 1 ? "" : "s"}`);
  const took = (clock.last - clock.first) / 1000;
  if (took > 0 && usage.completion_tokens > 1) parts.push(`${((usage.completion_tokens - 1) / took).toFixed(1)} tokens/s`);
  if (clock.first) parts.push(`first after ${Math.round(clock.first - clock.begin)} ms`);
  const cached = usage.prompt_tokens_details?.cached_tokens;
  if (cached) parts.push(`${number.format(cached)} of ${number.format(usage.prompt_tokens)} prompt tokens cached`);
  if (info?.context_length) {
    const share = (100 * usage.total_tokens) / info.context_length;
    parts.push(`context ${number.format(usage.total_tokens)} of ${number.format(info.context_length)} (${share.toFixed(0)}\u00a0%)`);
  }
  byId("figures").textContent = parts.join(" · ");
}

// --- Questions and answers ----------------------------------------------------------------------

async function send(signal, limit) {
  const temperature = byId("temperature").value, system = byId("system").value.trim();
  const body = { stream: true, stream_options: { include_usage: true }, max_tokens: limit };
  if (temperature !== "") body.temperature = Number(temperature);
  if (!chats) body.prompt = turns.map((turn) => turn.content).join("");
  else {
    body.messages = await Promise.all(turns.map(messageOf));
    if (system) body.messages.unshift({ role: "system", content: system });
  }
  return ask(chats ? "v1/chat/completions" : "v1/completions", {
    method: "POST",
    signal,
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
}

async function messageOf({ role, content, pictures: attached }) {
  if (attached.length === 0) return { role, content };
  const parts = await Promise.all(attached.map(pictures.partOf));
  if (content) parts.push({ type: "text", text: content });
  return { role, content: parts };
}

// Have the conversation answered. `asked` is taken back, and `replaced` put back, if nothing comes.
async function answer({ asked = null, replaced = null }) {
  const controller = new AbortController();
  const mine = turns; // a new conversation may have begun when the answer ends
  setAnswering(controller);
  following = true;
  byId("figures").textContent = "waiting for the first token";
  const response = send(controller.signal, limitOf()); // before the answer's own turn is among them
  const turn = show("assistant");
  const written = writer(turn);
  const clock = { begin: performance.now(), first: 0, last: 0 };
  let pieces = 0, reason = null;
  try {
    for await (const { data } of readFrames((await response).body)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices[0];
      const text = chats ? choice?.delta.content : choice?.text;
      const thought = chats ? choice?.delta.reasoning : "";
      if (thought) think(turn, thought);
      reason = choice?.finish_reason ?? reason;
      if (text || thought) {
        clock.last = performance.now();
        clock.first ||= clock.last;
        pieces++;
        const took = (clock.last - clock.first) / 1000;
        // A piece is mostly one token; the exact figures come with the end.
        if (took > 0.2) byId("figures").textContent = `about ${((pieces - 1) / took).toFixed(0)} tokens/s`;
      }
      if (text) {
        turn.content += text;
        written.append(text);
      }
      if (chunk.usage) showFigures(chunk.usage, clock, reason);
    }
    if (reason === null) throw new Error("the connection ended before the answer did");
    if (!turn.content) byId("figures").textContent = wordless(turn, reason);
  } catch (error) {
    if (controller.signal.aborted) byId("figures").textContent = "stopped";
    else if (mine === turns) {
      const isFull = error instanceof Refused && error.code === NO_ROOM;
      show("error", isFull ? `${error.message}. ${byId("clear").textContent} starts over.` : error.message);
      byId("figures").textContent = "";
    }
  }
  written.end();
  if (turn.content) {
    mine.push(turn);
    finish(turn);
  } else {
    turn.element.remove();
    if (mine === turns && replaced) putBack(replaced);
    else if (mine === turns && asked) takeBack(asked);
  }
  if (mine !== turns) byId("figures").textContent = "";
  setAnswering(null);
  follow();
}

function putBack(turn) {
  turns.at(-1).element.after(turn.element);
  turns.push(turn);
}

// Nothing came of what was said: it goes back to where it was written.
function takeBack(turn) {
  turns.pop();
  turn.element.remove();
  const prompt = byId("prompt");
  prompt.value = [turn.content, prompt.value].filter(Boolean).join("\n");
  pictures.putBack(turn.pictures);
}

byId("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const prompt = byId("prompt");
  const text = chats ? prompt.value.trim() : prompt.value;
  if (answering) return;
  const attached = pictures.take();
  if (!text && attached.length === 0 && (chats || turns.length === 0)) return;
  for (const error of box.querySelectorAll(".error")) error.remove();
  prompt.value = "";
  const asked = text || attached.length ? show("user", text, attached) : null;
  if (asked) turns.push(asked);
  answer({ asked });
});

byId("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.isComposing) return;
  const touch = matchMedia("(pointer: coarse)").matches; // whose keyboards have no Shift+Enter
  if (event.ctrlKey || event.metaKey || (chats && !event.shiftKey && !touch)) {
    event.preventDefault();
    byId("chat-form").requestSubmit();
  }
});

byId("stop").addEventListener("click", () => answering?.abort());

byId("again").addEventListener("click", () => {
  if (answering || turns.at(-1)?.role !== "assistant") return;
  const replaced = turns.pop();
  replaced.element.remove();
  for (const error of box.querySelectorAll(".error")) error.remove();
  answer({ replaced });
});

byId("clear").addEventListener("click", () => {
  answering?.abort();
  pictures.drop([...turns.flatMap((turn) => turn.pictures), ...pictures.take()]);
  turns = [];
  box.replaceChildren();
  byId("figures").textContent = "";
  byId("again").disabled = true;
  if (info) setMode(info.chats !== false);
  byId("prompt").focus();
});

// --- Copying ------------------------------------------------------------------------------------

box.addEventListener("click", async (event) => {
  const button = event.target.closest(".copy");
  if (!button) return;
  const code = button.closest(".code")?.querySelector("pre");
  const turn = turns.find(({ element }) => element.contains(button));
  const isDone = await copy(code?.textContent ?? turn?.content ?? "");
  button.textContent = isDone ? "Copied" : "Cannot copy";
  setTimeout(() => (button.textContent = "Copy"), 1500);
});

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // over plain HTTP from another machine there is no clipboard but the old one
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const isDone = document.execCommand("copy");
    area.remove();
    return isDone;
  }
}
