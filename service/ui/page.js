// The live page: reads the snapshots of /ui/events, one per second, and shows its own state.
import { showCharts } from "/ui/charts.js";
import { element, keyed, showRollouts, showSessions } from "/ui/rollouts.js";
import { compare, learn, paint } from "/ui/versions.js";

const RETRY_MILLISECONDS = 2000;
const SILENCE_MILLISECONDS = 8000; // without a snapshot, the connection counts as lost
const byId = (id) => document.getElementById(id);
let frozen = false;
let latest = null;

function setState(text, kind, notice = "") {
  const state = byId("state");
  if (state.textContent !== text) state.textContent = text;
  state.className = kind;
  byId("notice").textContent = notice;
  byId("notice").className = kind;
  byId("notice").hidden = !notice;
}

function size(bytes) {
  if (!bytes) return "0";
  const power = Math.min(4, Math.floor(Math.log2(bytes) / 10));
  return `${(bytes / 1024 ** power).toFixed(1)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

function duration(seconds) {
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const [unit, name] = parts.find(([length]) => seconds >= length) ?? [1, "s"];
  return `${Math.floor(seconds / unit)} ${name}`;
}

function named(version) {
  const label = element("span");
  const swatch = element("span", "swatch");
  paint(swatch, version);
  label.append(swatch, version);
  return label;
}

function row(...cells) {
  const made = element("tr");
  for (const cell of cells) made.append(element("td"));
  cells.forEach((cell, i) => made.children[i].append(cell));
  return made;
}

function showVersions(data) {
  byId("versions").replaceChildren(...data.versions.map((v) => row(named(v.version), v.sequence, v.state, v.num_bytes ? size(v.num_bytes) : "-")));
  const more = data.num_versions - data.versions.length;
  byId("versions-note").textContent = more > 0 ? `and ${more} older versions` : "";
}

function showArena(data) {
  const off = Boolean(data.reason);
  const states = ["leased", "reserved", "quarantined"];
  const amounts = [...states, "free"].map((state) => `${state} ${size(data[`${state}_bytes`])}`).join(", ");
  byId("arena").textContent = off ? `Not available: ${data.reason}.` : `${data.num_handles} handles, ${data.transfers} downloads. Of ${size(data.capacity_bytes)}: ${amounts}.`;
  byId("arena-bar").hidden = off;
  byId("arena-bar").setAttribute("aria-label", amounts);
  byId("arena-bar").replaceChildren(...(off ? [] : states).map((state) => {
    const part = element("div", state);
    part.style.width = `${(100 * data[`${state}_bytes`]) / data.capacity_bytes}%`;
    part.title = `${state} ${size(data[`${state}_bytes`])}`;
    return part;
  }));
  byId("leases").hidden = !data.leases.length;
  byId("leases").tBodies[0].replaceChildren(...data.leases.map((lease) => {
    const left = lease.lease_seconds === null ? "not begun" : duration(lease.lease_seconds);
    return row(left, lease.owner, named(lease.version), lease.tokens, size(lease.num_bytes), lease.readers);
  }));
}

function showSpeculation(data) {
  byId("speculation").hidden = !data;
  if (!data) return;
  byId("drafted").textContent = `${(100 * data.acceptance).toFixed(0)} % of the tokens drafted since the last change of weights were accepted. Recent speedup: ${data.gain.toFixed(2)}.`;
  byId("drafts").replaceChildren(...data.drafts.map(([length, number]) => row(`${length} tokens`, number)));
}

function showFeatures(features) {
  byId("features").hidden = !features?.length;
  byId("features").querySelector("ul").replaceChildren(...(features ?? []).map((feature) => {
    const item = element("li");
    const state = feature.enabled ? "on" : "off";
    item.append(element("b", "", feature.name.replaceAll("_", " ")), " ", element("span", state, state));
    item.append(element("div", "soft", feature.reason));
    if (!feature.enabled && feature.how_to_change) item.append(element("div", "", feature.how_to_change));
    return item;
  }));
}

function showLegend(data) {
  const groups = data.rollouts.flatMap((rollout) => rollout.groups);
  const trees = [...groups.flatMap((group) => group.tree ?? []), ...data.sessions];
  const parts = [...groups.flatMap((group) => group.samples), ...trees.flatMap((tree) => [...tree.segments, ...tree.running])];
  const versions = new Set(parts.flatMap((part) => part.versions.map((span) => span.version)).filter((version) => version !== null));
  keyed(byId("legend"), [...versions].sort(compare), (version) => version, (version) => {
    const item = element("li");
    item.append(named(version));
    return item;
  }, () => {});
}

function showWork(data) {
  const { running, admitted, limit } = data.samples;
  const more = data.num_rollouts - data.rollouts.length;
  byId("work-note").textContent = data.num_rollouts
    ? `${data.num_rollouts} ${data.num_rollouts === 1 ? "rollout" : "rollouts"}${more > 0 ? `, the newest ${data.rollouts.length} shown` : ""}; ${running} samples submitted to the engine, ${admitted} of at most ${limit.toLocaleString("en")} admitted. A bar is a sample or a segment of a tree: its length is its number of tokens, its colour the weights version that generated them. A bar that ends in a mark is still growing. A dot at the end of a segment: its KV is exported.`
    : "No rollout is running. Rollouts appear here while they run.";
  showRollouts(data, byId("rollouts"));
  showAgents(data);
  showLegend(data); // after the bars, which give unlisted versions their colours
}

function showAgents(data) {
  const more = data.num_sessions - data.sessions.length;
  byId("agents").hidden = !data.sessions.length;
  byId("agents-note").textContent = `${data.num_sessions} open${more > 0 ? `, the ${data.sessions.length} that were active last are shown` : ""}. Grey bars are context: prompts, tool results and chat templates. Coloured bars are what the policy sampled.`;
  showSessions(data, byId("sessions"));
}

const STAGES = {
  starting: ["loading", "", "The model is loading."],
  activating: ["activating", "", ""],
  sleeping: ["sleeping", "", "The engine has released memory for a trainer."],
  dead: ["engine failed", "bad", "The engine has stopped and does not serve requests."],
  stopping: ["stopping", "bad", "The server is shutting down."],
};

function showStage(data) {
  const [text, kind, notice] = STAGES[data.stage] ?? ["serving", "good", ""];
  if (data.stage === "serving" && data.paused) setState("paused", "bad", "Sampling is paused by request of an operator.");
  else setState(text, kind, data.stage === "dead" && data.reason ? `${notice} ${data.reason}` : notice);
}

function show(data) {
  latest = data;
  if (frozen) return;
  const active = data.versions.find((version) => version.state === "active");
  document.title = data.model ? `${data.model} - Coppice` : "Coppice";
  byId("model").textContent = data.model ?? "Coppice";
  byId("facts").textContent = data.model ? `served by Coppice, weights ${active.version}, up ${duration(data.uptime_seconds)}` : "";
  showStage(data);
  learn(data.versions);
  showCharts(data, byId("charts"));
  showWork(data);
  showVersions(data);
  showArena(data.kv);
  showSpeculation(data.speculation);
  showFeatures(data.features);
  byId("content").classList.remove("stale");
  byId("content").hidden = data.stage === "starting";
  byId("freeze").hidden = byId("content").hidden;
}

function lost(error) {
  if (latest?.draining) error = "the server is shutting down";
  const last = latest ? " What is shown below is out of date." : "";
  const message = `The connection to the server is lost${error ? ` (${error})` : ""}. Trying again every ${RETRY_MILLISECONDS / 1000} seconds.${last}`;
  setState(latest ? "connection lost" : "not connected", "bad", message);
  byId("content").classList.add("stale");
}

// fetch instead of EventSource, which cannot send a key. The key is only kept in memory.
async function watch(secret) {
  const silence = new AbortController();
  let timer = setTimeout(() => silence.abort(), SILENCE_MILLISECONDS);
  try {
    const headers = secret ? { Authorization: `Bearer ${secret}` } : {};
    const answer = await fetch("/ui/events", { headers, signal: silence.signal });
    if (answer.status === 401 || answer.status === 403) return answer.status;
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = "", done = false; !done; ) {
      const part = await reader.read();
      done = part.done;
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(), SILENCE_MILLISECONDS);
      const events = (rest + (part.value ?? "")).split("\n\n");
      rest = events.pop();
      if (events.length) show(JSON.parse(events.at(-1).slice("data: ".length)));
    }
    return 0;
  } finally {
    clearTimeout(timer);
  }
}

function askForKey(status, secret) {
  const refused = secret ? "The server did not accept this API key." : "This server requires an API key.";
  setState("API key required", "bad", status === 403 ? "This API key lacks the role watch." : refused);
  byId("content").hidden = true;
  byId("freeze").hidden = true;
  byId("key").hidden = false;
  byId("secret").focus();
}

async function keepWatching(secret) {
  for (;;) {
    let error = "";
    try {
      const status = await watch(secret);
      if (status) return askForKey(status, secret);
    } catch (failure) {
      error = failure.name === "AbortError" ? "the server sends nothing" : failure.message;
    }
    lost(error);
    await new Promise((resolve) => setTimeout(resolve, RETRY_MILLISECONDS));
  }
}

byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  byId("key").hidden = true;
  setState("connecting", "", "Connecting to the server.");
  keepWatching(byId("secret").value);
});
byId("freeze").addEventListener("click", () => {
  frozen = !frozen;
  byId("freeze").setAttribute("aria-pressed", String(frozen));
  byId("freeze").textContent = frozen ? "Frozen" : "Freeze";
  if (!frozen && latest) show(latest);
});
keepWatching("");
