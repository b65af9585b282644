// Renders the snapshots of /ui/events, one per second. Values are set only as text or numbers: data
// of the server is never parsed as markup.
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

// Colour of a weights version, constant while the page is open.
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
    part.title = `${bar.title}, ${span.tokens} of version ${span.version}`;
    bar.append(part);
  }
  return bar;
}

function svgElement(name, attributes, title) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (title) made.appendChild(document.createElementNS(SVG, "title")).textContent = title;
  return made;
}

// Layout of a tree: every node gets `from` and `to` in tokens, and `row` in leaves. A path that is
// being generated is a node of length 0, because its length is unknown until it ends.
function layout(data) {
  const below = new Map();
  const growing = data.growing.map((parent) => ({ parent, tokens: 0, growing: true }));
  for (const node of [...data.segments, ...growing]) {
    if (!below.has(node.parent)) below.set(node.parent, []);
    below.get(node.parent).push(node);
  }
  let rows = 0;
  const place = (node, from) => {
    node.from = from;
    node.to = from + node.tokens;
    const children = (!node.growing && below.get(node.id)) || [];
    for (const child of children) place(child, node.to);
    node.row = children.length ? (children[0].row + children[children.length - 1].row) / 2 : rows++;
  };
  const root = { id: null, tokens: 0 };
  place(root, 0);
  return { root, nodes: [...data.segments, ...growing], rows };
}

function tree(data) {
  const { root, nodes, rows } = layout(data);
  const longest = Math.max(1, ...nodes.map((node) => node.to));
  const x = (tokens) => 10 + (940 * tokens) / longest;
  const y = (row) => 10 + 12 * row;
  const image = svgElement("svg", { viewBox: `0 0 1000 ${8 + 12 * rows}`, role: "img", "aria-label": "tree of segments" });
  const byName = new Map([[null, root], ...data.segments.map((segment) => [segment.id, segment])]);
  for (const node of nodes) {
    const parent = byName.get(node.parent);
    image.append(svgElement("path", { class: "fork", d: `M${x(node.from)} ${y(parent.row)}V${y(node.row)}` }));
    image.append(...(node.growing ? [stub(node, x, y)] : segment(node, x, y)));
  }
  return image;
}

function stub(node, x, y) {
  const line = { class: "growing", x1: x(node.from), x2: x(node.from) + 40, y1: y(node.row), y2: y(node.row) };
  return svgElement("line", line, "being generated");
}

function segment(node, x, y) {
  const parts = [];
  let at = node.from;
  for (const span of node.versions) {
    const line = { class: "segment", x1: x(at), x2: x(at + span.tokens), y1: y(node.row), y2: y(node.row), stroke: colour(span.version) };
    parts.push(svgElement("line", line, `segment ${node.id}: ${node.tokens} tokens, ${node.finish_reason}, ${span.tokens} of version ${span.version}`));
    at += span.tokens;
  }
  if (node.kv) parts.push(svgElement("circle", { cx: x(node.to), cy: y(node.row), r: 4 }, "KV of the path is exported"));
  return parts;
}

function treeGroup(data) {
  const box = element("div", "group wide");
  const { segments, num_segments: all, growing } = data.tree;
  const more = all > segments.length ? `, ${segments.length} of them shown` : "";
  box.append(element("div", "", `group ${data.index}: tree of ${all} segments${more}, ${growing.length} running paths, ${data.prompt_tokens} prompt tokens`));
  box.append(tree(data.tree));
  return box;
}

function group(data) {
  if (data.tree) return treeGroup(data);
  const box = element("div", "group");
  const done = data.ended.length;
  box.append(element("div", "", `group ${data.index}: ${data.n} samples, ${data.running} running, ${data.prompt_tokens} prompt tokens`));
  const longest = Math.max(1, ...data.ended.map((ended) => ended.tokens));
  for (const ended of data.ended) box.append(sample(ended, longest));
  for (let i = 0; i < Math.min(data.running, 64 - done); i++) box.append(element("div", "sample running"));
  return box;
}

function rollout(data) {
  const box = element("article");
  box.append(element("h3", "", `rollout ${data.id} of ${data.owner}, ${data.num_groups} groups`));
  const groups = element("div", "groups");
  groups.append(...data.groups.map(group));
  box.append(groups);
  return box;
}

function version(data) {
  const row = element("tr");
  for (const text of [data.version, data.sequence, data.state, size(data.num_bytes)]) row.append(element("td", "", text));
  row.firstChild.style.color = colour(data.version);
  return row;
}

function lease(data) {
  const row = element("tr");
  const left = data.lease_seconds === null ? "not begun" : `${Math.ceil(data.lease_seconds)} s`;
  for (const text of [left, data.owner, data.version, data.tokens, size(data.num_bytes), data.readers]) row.append(element("td", "", text));
  return row;
}

function arena(data) {
  const parts = ["leased", "reserved", "quarantined"].filter((state) => data[`${state}_bytes`]);
  const amounts = ["leased", "reserved", "quarantined", "free"].map((state) => `${state} ${size(data[`${state}_bytes`]) || 0}`);
  byId("arena").textContent = data.reason ? `not available: ${data.reason}` : `${data.num_handles} handles, whose lease begins when their rollout ends; ${data.transfers} downloads. Of ${size(data.capacity_bytes)}: ${amounts.join(", ")}`;
  byId("arena-bar").replaceChildren(...parts.map((state) => {
    const part = element("div", state);
    part.style.width = `${(100 * data[`${state}_bytes`]) / data.capacity_bytes}%`;
    part.title = `${state} ${size(data[`${state}_bytes`])}`;
    return part;
  }));
  byId("arena-bar").hidden = Boolean(data.reason);
  byId("leases").hidden = !data.leases.length;
  byId("leases").tBodies[0].replaceChildren(...data.leases.map(lease));
}

const percent = (share) => `${(100 * share).toFixed(0)} %`;

function speculation(data) {
  byId("speculation").hidden = !data;
  if (!data) return;
  byId("drafted").textContent = `${percent(data.acceptance)} of the tokens drafted since the last change of weights were accepted; recent speedup ${data.gain.toFixed(2)}`;
  const most = Math.max(...data.drafts.map(([, count]) => count));
  byId("drafts").replaceChildren(...data.drafts.map(([length, count]) => {
    const row = element("div", "drafts");
    const bar = element("div", "leased");
    bar.style.width = `${(80 * count) / most}%`;
    row.append(element("span", "", `${length} tokens`), bar, element("span", "", String(count)));
    return row;
  }));
}

function history(samples) {
  past.push(samples.admitted);
  if (past.length > 300) past.shift();
  const top = Math.max(1, ...past);
  const line = document.createElementNS(SVG, "polyline");
  line.setAttribute("points", past.map((count, i) => `${i},${58 - (56 * count) / top}`).join(" "));
  byId("history").replaceChildren(line);
}

function show(data) {
  byId("model").textContent = data.model ?? "";
  state(data.paused ? "paused" : data.stage, data.stage !== "serving" || data.paused);
  byId("load").textContent = `${data.samples.running} in the engine, ${data.samples.admitted} admitted, limit ${data.samples.limit}`;
  history(data.samples);
  byId("versions").replaceChildren(...data.versions.map(version));
  arena(data.kv);
  speculation(data.speculation);
  const more = data.num_rollouts - data.rollouts.length;
  byId("rollouts").replaceChildren(...data.rollouts.map(rollout));
  if (more > 0) byId("rollouts").append(element("p", "", `and ${more} more rollouts`));
  if (!data.num_rollouts) byId("rollouts").append(element("p", "", "no running rollouts"));
}

function state(text, bad) {
  byId("state").textContent = text;
  byId("state").className = bad ? "bad" : "";
}

// fetch instead of EventSource, which cannot send a key. The key is only kept in memory.
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
      state(status === 401 ? "an API key is required" : "the API key lacks the role watch", true);
      byId("key").hidden = false;
      return;
    }
    state("disconnected", true);
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  byId("key").hidden = true;
  keepWatching(byId("secret").value);
});
keepWatching("");
