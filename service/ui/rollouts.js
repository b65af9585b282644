// Rollouts, groups, samples, trees and agent sessions. Values are set only as text or numbers: data of the server is
// never parsed as markup. Elements are kept from snapshot to snapshot, so that the focus and open
// groups stay and bars grow smoothly.
import { nice } from "/ui/charts.js";
import { paint } from "/ui/versions.js";

const ROW = 18; // pixels per leaf of a tree
const DENSE = 16; // samples of a group above which rows are thin

export function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// Make the children of `parent` those of `items`, and reuse the children with the same key.
export function keyed(parent, items, key, create, update) {
  const before = parent.keyed ?? new Map();
  parent.keyed = new Map();
  items.forEach((item, i) => {
    const child = before.get(key(item)) ?? create(item);
    before.delete(key(item));
    parent.keyed.set(key(item), child);
    if (parent.children[i] !== child) parent.insertBefore(child, parent.children[i] ?? null);
    update(child, item);
  });
  for (const child of before.values()) child.remove();
}

const describe = (versions) => versions.map((span) => `${span.tokens} of ${span.version ?? "later versions"}`).join(", ");

function fill(bar, versions) {
  keyed(bar, versions.map((span, i) => ({ ...span, i })), (span) => span.i, () => element("span"), (part, span) => {
    part.style.flexGrow = span.tokens;
    paint(part, span.version);
  });
}

// Ticks at the given shares of an axis that ends at `top`.
function axis(box, top, shares) {
  const ticks = shares.filter((share) => Number.isInteger(share * top));
  box.replaceChildren(...ticks.map((share) => {
    const tick = element("span", "", share === 1 ? `${top} tokens` : String(share * top));
    tick.style.left = `${100 * share}%`;
    return tick;
  }));
}

// Samples

function createSample() {
  const row = element("li");
  const track = element("div", "track");
  track.append(element("div", "bar"));
  row.append(element("span"), track, element("span"), element("span", "reason"));
  return row;
}

function updateSample(row, sample, group, top) {
  const [index, track, tokens, reason] = row.children;
  const running = sample.finish_reason === null;
  row.className = !running ? "" : sample.tokens ? "running" : "waiting";
  index.textContent = sample.index;
  tokens.textContent = running ? `${sample.tokens} / ${group.max_tokens}` : sample.tokens;
  reason.textContent = sample.finish_reason ?? row.className;
  track.firstChild.hidden = !sample.tokens;
  track.firstChild.style.width = `${(100 * sample.tokens) / top}%`;
  fill(track.firstChild, sample.versions);
  const wait = row.className === "waiting" ? "no token yet: in the queue or in prefill" : describe(sample.versions);
  row.title = `sample ${sample.index}: ${sample.tokens} of at most ${group.max_tokens} tokens, ${reason.textContent}; ${wait}`;
}

function updateSamples(box, group) {
  const [head, rows, scale] = box.children;
  const { samples } = group;
  const top = Math.min(group.max_tokens, nice(Math.max(1, ...samples.map((sample) => sample.tokens))));
  const rest = samples.length < group.n ? `, ${samples.length} of them shown` : "";
  head.textContent = `Group ${group.index}: ${group.n} samples${rest}, ${group.done} finished, ${group.prompt_tokens} prompt tokens`;
  rows.className = samples.length > DENSE ? "rows dense" : "rows";
  keyed(rows, samples, (sample) => sample.index, createSample, (row, sample) => updateSample(row, sample, group, top));
  axis(scale, top, [0, 0.5, 1]);
}

// Trees

// Every node gets `from` and `to` in tokens and `row` in leaves, a node with children the middle row.
function layout(nodes) {
  const below = new Map();
  for (const node of nodes) {
    if (!below.has(node.parent)) below.set(node.parent, []);
    below.get(node.parent).push(node);
  }
  let rows = 0;
  const place = (node, from) => {
    node.from = from;
    node.to = from + node.tokens;
    const children = (node.id !== undefined && below.get(node.id)) || [];
    for (const child of children) place(child, node.to);
    node.children = children.length;
    node.row = children.length ? (children[0].row + children[children.length - 1].row) / 2 : rows++;
  };
  const root = { id: null, tokens: 0 };
  place(root, 0);
  return { root, rows };
}

function createNode() {
  const item = element("li");
  item.append(element("span", "fork"), element("div", "bar"), element("span", "kv"), element("span", "label"));
  return item;
}

function updateNode(item, node, parent, top) {
  const [fork, bar, kv, label] = item.children;
  const running = node.limit !== undefined;
  const context = node.finish_reason === "context";
  const state = running ? (node.tokens ? "running" : "waiting") : node.finish_reason;
  item.className = running || context ? state : "";
  item.style.left = `${(100 * node.from) / top}%`;
  item.style.width = `${(100 * node.tokens) / top}%`;
  item.style.top = `${ROW * node.row + 4}px`;
  fork.style.top = `${Math.min(0, ROW * (parent.row - node.row)) + 4}px`;
  fork.style.height = `${Math.abs(ROW * (parent.row - node.row)) + 1}px`;
  bar.hidden = !node.tokens;
  kv.hidden = !node.kv;
  fill(bar, node.versions);
  label.hidden = node.children > 0;
  const amount = running ? `${node.tokens} / ${node.limit}` : `${node.tokens}`;
  label.textContent = `${amount} ${state}`;
  const origin = node.parent === null ? "from the start" : `child of ${node.parent}`;
  const spans = node.versions.length ? `; ${describe(node.versions)}` : "";
  item.title = `${running ? "running path" : `segment ${node.id}`}, ${origin}: ${amount} tokens, ${state}${node.kv ? ", KV exported" : ""}${spans}`;
  item.setAttribute("aria-label", item.title);
}

function updateTree(box, group) {
  const [head, canvas] = box.children;
  const { segments, running, num_segments, num_running } = group.tree;
  const shown = segments.length + running.length;
  const more = num_segments + num_running > shown ? `, ${shown} of them shown` : "";
  head.textContent = `Group ${group.index}: tree of ${num_segments} finished segments and ${num_running} running paths${more}, at most ${group.n} leaves`;
  const text = `prompt: ${group.prompt_tokens}`;
  drawTree(canvas, segments, running, { text, title: `${group.prompt_tokens} prompt tokens` });
}

// Draw segments and running paths below the given start.
function drawTree(canvas, segments, running, start) {
  const [items, scale] = canvas.children;
  const nodes = [...segments, ...running];
  const { root, rows } = layout(nodes);
  const top = nice(Math.max(1, ...nodes.map((node) => node.to)));
  items.style.height = `${ROW * Math.max(1, rows)}px`;
  const byId = new Map([[null, root], ...segments.map((segment) => [segment.id, segment])]);
  keyed(items, [{ prompt: true }, ...nodes], (node) => node.prompt || (node.id ?? `running ${node.path}`), (node) => (node.prompt ? element("li", "prompt") : createNode()), (item, node) => {
    if (!node.prompt) return updateNode(item, node, byId.get(node.parent), top);
    item.textContent = start.text;
    item.title = start.title;
    item.style.top = `${ROW * root.row + 4}px`;
  });
  axis(scale, top, [0, 0.25, 0.5, 0.75, 1]);
}

function createGroup(group) {
  const box = element("div", group.tree ? "group tree" : "group");
  const list = element("ul", group.tree ? "nodes" : "rows");
  box.append(element("h3"));
  if (!group.tree) box.append(list, element("div", "axis"));
  else box.append(createCanvas(list));
  return box;
}

function createCanvas(list) {
  const canvas = element("div", "canvas");
  canvas.append(list, element("div", "axis"));
  return canvas;
}

function createRollout() {
  const box = element("details");
  box.open = true;
  box.append(element("summary"), element("div", "groups"));
  return box;
}

function updateRollout(box, rollout) {
  const [head, groups] = box.children;
  const shown = rollout.groups.length < rollout.num_groups ? `, first ${rollout.groups.length} shown` : "";
  head.replaceChildren(element("b", "", rollout.id), ` · API key ${rollout.owner} · ${count(rollout.num_groups, "group")}${shown}`);
  keyed(groups, rollout.groups, (group) => group.index, createGroup, (child, group) => (group.tree ? updateTree : updateSamples)(child, group));
}

const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

// Agent sessions

function createSession() {
  const box = element("details");
  box.open = true;
  const tree = element("div", "group tree");
  tree.append(element("h3"), createCanvas(element("ul", "nodes")));
  box.append(element("summary"), tree);
  return box;
}

function updateSession(box, session) {
  const [head, tree] = box.children;
  const [title, canvas] = tree.children;
  const pause = session.pause_seconds;
  const state = pause === null ? `${count(session.running_calls, "running call")}` : `waits for the agent since ${Math.floor(pause)} s`;
  head.replaceChildren(element("b", "", session.id), ` · API key ${session.owner} · ${state}`);
  const shown = session.segments.length < session.num_segments ? `, first ${count(session.segments.length, "segment")} shown` : "";
  title.textContent = `${session.turns} of at most ${session.max_turns} turns, ${session.sampled_tokens} sampled tokens, ${session.context_tokens} context tokens${shown}`;
  canvas.hidden = !session.segments.length;
  drawTree(canvas, session.segments, session.running, { text: "", title: "start of the session" });
}

export function showSessions(data, container) {
  keyed(container, data.sessions, (session) => session.id, createSession, updateSession);
}

export function showRollouts(data, container) {
  keyed(container, data.rollouts, (rollout) => rollout.id, createRollout, updateRollout);
}
