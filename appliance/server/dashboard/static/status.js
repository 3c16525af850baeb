// What the event feed tells of the server: facts, block map, tasks and the log.

import { byId, number } from "./api.js";
import { BlockMap } from "./blocks.js";

const SHOWN_LINES = 20;
const jobs = new Map();
const map = new BlockMap(byId("map"));
let info = null;
let encoding = 0; // requests that wait for their pictures

// The feed of the chosen replica's blocks, of a model that has several.
export function feedPath() {
  const place = Number(byId("replica").value);
  return place ? `admin/v1/events?replica=${place}` : "admin/v1/events";
}

// The feed begins, with all that is kept.
export function forgetStatus() {
  byId("log").replaceChildren();
  jobs.clear();
  showJobs();
}

export async function takeStatus(name, event) {
  if (name === "info") takeInfo(event);
  else if (name === "snapshot") await map.take(event);
  else if (name === "delta") map.change(event);
  else if (name === "sequences") encoding = event.sequences.filter(({ status }) => status === "encoding").length;
  else if (name === "stats") takeStats(event);
  else if (name === "job") takeJob(event);
  else if (name === "log") takeLog(event);
}

// Of states in which requests are taken; asleep is neither good nor bad.
const KINDS = { ready: "ready", asleep: "", waking: "" };

export function showState(text, kind) {
  byId("state").textContent = text;
  byId("state").className = `state ${kind}`;
}

function takeInfo(event) {
  info = event;
  byId("model").textContent = info.model;
  document.title = `${info.model} · Appliance`;
  showState(info.reason ? `${info.state}: ${info.reason}` : info.state, KINDS[info.state] ?? "bad");
}

function takeStats(stats) {
  const { engine } = stats;
  const rows = {
    Models: (info.models ?? []).map((model) => `${model.name} (${model.state})`).join(", "),
    Architecture: info.architecture,
    Weights: info.weight_format,
    Device: info.device,
    Context: `${number.format(info.context_length)} tokens`,
    Sampling: sampling(info.sampling ?? {}),
    "KV cache": `${info.kv_format}, ${number.format(info.num_blocks)} blocks of ${info.block_size}`,
    "KV in host memory": engine.kv_host_capacity
      ? `${number.format(engine.kv_host_blocks)} of ${number.format(engine.kv_host_capacity)} blocks, ${number.format(engine.kv_host_swapped)} swapped` : "",
    Requests: `${stats.requests_running} running, ${stats.requests_waiting} waiting`,
    "Tokens per second": `${rate(stats.prompt_tokens_per_second)} in, ${rate(stats.generation_tokens_per_second)} out`,
    "First token": seconds(stats.time_to_first_token),
    "Between tokens": seconds(stats.inter_token_latency),
    Pictures: info.reads_pictures ? pictures(engine) : "",
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
  showReplicas(stats.replicas ?? []);
  const use = engine.blocks_total ? engine.blocks_active / engine.blocks_total : 0;
  byId("kv").value = use;
  byId("kv-text").textContent = `${(100 * use).toFixed(use < 0.1 ? 1 : 0)} %`;
  const text = `${engine.blocks_active} blocks active, ${engine.blocks_cached} cached, ${engine.blocks_free} free`;
  byId("map").setAttribute("aria-label", `Block map: ${text}`);
}

function showReplicas(replicas) {
  byId("replica-part").hidden = !replicas.length;
  const list = byId("replica");
  const texts = replicas.map((one, place) => `${place}: ${one.state}, ${one.requests_running} running, ${one.requests_waiting} waiting`);
  if (list.length !== texts.length) {
    list.replaceChildren(...texts.map((text, place) => new Option(text, place)));
    list.value = info.replica;
  }
  texts.forEach((text, place) => (list.options[place].text = text)); // a list that is open stays so
}

function takeJob(job) {
  if (job.ended) jobs.delete(job.name);
  else jobs.set(job.name, job);
  showJobs();
}

function showJobs() {
  byId("jobs").replaceChildren(...[...jobs.values()].map((job) => {
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
const sampling = (values) => Object.entries(values).map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`).join(", ");
const two = (value) => String(value).padStart(2, "0");
function clock(secondsLeft) {
  const whole = Math.round(secondsLeft), minutes = Math.floor(whole / 60), hours = Math.floor(minutes / 60);
  if (whole < 60) return `${whole} s`;
  return hours ? `${hours}:${two(minutes % 60)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}
const mebibytes = (bytes) => `${number.format(Math.round(bytes / 2 ** 20))} MiB`;
const pictures = (engine) => [
  `${number.format(engine.pictures_encoded_total)} encoded`,
  engine.pictures_encoded_total ? `${(1000 * engine.picture_seconds_total / engine.pictures_encoded_total).toFixed(0)} ms each` : "",
  `${number.format(engine.picture_hits_total)} met again`,
  `${mebibytes(engine.picture_bytes)} of rows`,
  encoding ? `${encoding} waiting for theirs` : "",
].filter(Boolean).join(", ");
const memory = (machine) => (machine ? `${mebibytes(machine.engine_rss_bytes)} engine, ${mebibytes(machine.api_rss_bytes)} API` : "");
