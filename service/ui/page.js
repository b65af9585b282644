// Draws what /ui/events tells, once a second. Everything is set as text or as numbers: nothing that
// the server sends becomes markup.
"use strict";

const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const HUES = [145, 210, 30, 280, 0, 60, 180, 320];
const hues = new Map();
const past = [];

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// A version keeps its colour for as long as the page is open.
function colour(version) {
  if (!hues.has(version)) hues.set(version, HUES[hues.size % HUES.length]);
  return `hsl(${hues.get(version)} 45% 45%)`;
}

function size(bytes) {
  if (!bytes) return "";
  const power = Math.min(3, Math.floor(Math.log2(bytes) / 10));
  return `${(bytes / 1024 ** power).toFixed(1)} ${["B", "KiB", "MiB", "GiB"][power]}`;
}

function sample(ended, longest) {
  const bar = element("div", "sample");
  bar.title = `sample ${ended.index}: ${ended.tokens} tokens, ${ended.finish_reason}`;
  for (const span of ended.versions) {
    const part = element("div");
    part.style.width = `${(100 * span.tokens) / longest}%`;
    part.style.background = colour(span.version);
    part.title = `${bar.title}, ${span.tokens} of ${span.version}`;
    bar.append(part);
  }
  return bar;
}

function group(told) {
  const box = element("div", "group");
  const done = told.ended.length;
  box.append(element("div", "", `group ${told.index}: ${told.n} samples, ${told.running} running, prompt of ${told.prompt_tokens}`));
  const longest = Math.max(1, ...told.ended.map((ended) => ended.tokens));
  for (const ended of told.ended) box.append(sample(ended, longest));
  for (let i = 0; i < Math.min(told.running, 64 - done); i++) box.append(element("div", "sample running"));
  return box;
}

function rollout(told) {
  const box = element("article");
  box.append(element("h3", "", `${told.id} of ${told.owner}, ${told.num_groups} groups`));
  const groups = element("div", "groups");
  groups.append(...told.groups.map(group));
  box.append(groups);
  return box;
}

function version(told) {
  const row = element("tr");
  for (const text of [told.version, told.sequence, told.state, size(told.num_bytes)]) row.append(element("td", "", text));
  row.firstChild.style.color = colour(told.version);
  return row;
}

function history(samples) {
  past.push(samples.admitted);
  if (past.length > 300) past.shift();
  const top = Math.max(1, ...past);
  const line = document.createElementNS(SVG, "polyline");
  line.setAttribute("points", past.map((count, i) => `${i},${58 - (56 * count) / top}`).join(" "));
  byId("history").replaceChildren(line);
}

function show(told) {
  byId("model").textContent = told.model ?? "";
  state(told.paused ? "paused" : told.stage, told.stage !== "serving" || told.paused);
  byId("load").textContent = `${told.samples.running} in the engine, ${told.samples.admitted} admitted, at most ${told.samples.limit}`;
  history(told.samples);
  byId("versions").replaceChildren(...told.versions.map(version));
  const more = told.num_rollouts - told.rollouts.length;
  byId("rollouts").replaceChildren(...told.rollouts.map(rollout));
  if (more > 0) byId("rollouts").append(element("p", "", `and ${more} more rollouts`));
  if (!told.num_rollouts) byId("rollouts").append(element("p", "", "nothing runs"));
}

function state(text, bad) {
  byId("state").textContent = text;
  byId("state").className = bad ? "bad" : "";
}

// fetch and not EventSource, which cannot send a key. The key stays in this page's memory.
async function watch(secret) {
  const headers = secret ? { Authorization: `Bearer ${secret}` } : {};
  const answer = await fetch("/ui/events", { headers });
  if (answer.status === 401 || answer.status === 403) return answer.status;
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return 0;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) show(JSON.parse(event.slice("data: ".length)));
  }
}

async function keepWatching(secret) {
  for (;;) {
    let status = 0;
    try {
      status = await watch(secret);
    } catch (error) {
      console.log(String(error));
    }
    if (status) {
      state(status === 401 ? "a key is needed" : "this key may not watch", true);
      byId("key").hidden = false;
      return;
    }
    state("not connected", true);
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  byId("key").hidden = true;
  keepWatching(byId("secret").value);
});
keepWatching("");
