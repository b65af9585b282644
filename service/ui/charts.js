// Charts of the last five minutes. The page keeps 301 points per chart and no more.
import { element } from "/ui/rollouts.js";

const SVG = "http://www.w3.org/2000/svg";
const WINDOW_SECONDS = 300;
const SHORTEST_SECONDS = 60; // the time axis right after the page was opened
const RATE_SECONDS = 5;
const past = [];

const rate = (name, per) => (now, points) => {
  const before = points.find((point) => point.load && now.at - point.at <= RATE_SECONDS);
  if (!now.load || !before || before === now) return null;
  return Math.max(0, (per * (now.load[name] - before.load[name])) / (now.at - before.at));
};
const level = (name, scale = 1) => (now) => (now.load ? scale * now.load[name] : null);

const CHARTS = [
  { title: "Throughput", unit: "tokens/s", lines: { generated: rate("generated_tokens", 1), "prompt (prefill)": rate("prompt_tokens", 1) } },
  { title: "Samples in the engine", unit: "samples", lines: { running: level("running"), waiting: level("waiting") } },
  { title: "KV cache in use", unit: "%", top: 100, lines: { used: level("kv_usage", 100) } },
  { title: "Preemptions", unit: "per minute", lines: { preempted: rate("preemptions", 60) } },
];

const number = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });

// Smallest round number that is at least `value`: the end of an axis.
export function nice(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10].map((step) => Math.ceil(step * power)).find((step) => step >= value);
}

function create(chart) {
  const box = element("div", "chart");
  const head = element("h2", "", chart.title);
  const plot = element("div", "plot");
  const ys = element("div", "ys");
  const image = document.createElementNS(SVG, "svg");
  for (const [name, value] of [["viewBox", "0 0 300 100"], ["preserveAspectRatio", "none"], ["role", "img"]]) image.setAttribute(name, value);
  const xs = element("div", "xs");
  xs.append(element("span"), element("span", "", "now"));
  plot.append(ys, image, xs);
  const keys = element("p", "keys");
  keys.append(...Object.keys(chart.lines).map((_, i) => element("span", i ? "second" : "")));
  head.append(element("span", "soft", chart.unit));
  box.append(head, plot, keys);
  return Object.assign(box, { keys, ys, xs, image });
}

function line(points, top, second) {
  const made = document.createElementNS(SVG, "polyline");
  made.setAttribute("points", points.map(([x, y]) => `${x.toFixed(1)},${(100 - (100 * y) / top).toFixed(1)}`).join(" "));
  if (second) made.setAttribute("class", "second");
  return made;
}

function middle() {
  const made = document.createElementNS(SVG, "line");
  for (const [name, value] of [["x1", 0], ["x2", 300], ["y1", 50], ["y2", 50]]) made.setAttribute(name, value);
  return made;
}

function update(box, chart) {
  const now = past[past.length - 1];
  const names = Object.keys(chart.lines);
  const known = past.map((point) => [point, point.values.get(chart)]).filter(([, values]) => values.every((value) => value !== null));
  const missing = now.load ? "measuring" : "not reported";
  const summary = names.map((name, i) => `${name}: ${now.values.get(chart)[i] === null ? missing : number(now.values.get(chart)[i])}`);
  const top = chart.top ?? nice(Math.max(1, ...known.flatMap(([, values]) => values)));
  const width = Math.max(SHORTEST_SECONDS, Math.ceil((now.at - past[0].at) / 60) * 60);
  names.forEach((_, i) => (box.keys.children[i].textContent = summary[i]));
  box.xs.firstChild.textContent = `${width / 60} min ago`;
  box.ys.replaceChildren(...[top, top / 2, 0].map((value) => element("span", "", number(value))));
  const lines = names.map((_, i) => line(known.map(([point, values]) => [300 - (300 * (now.at - point.at)) / width, values[i]]), top, i > 0));
  box.image.replaceChildren(middle(), ...lines);
  box.image.setAttribute("aria-label", `${chart.title} in ${chart.unit}, last ${width / 60} minutes, axis from 0 to ${number(top)}; now ${summary.join(", ")}`);
}

export function showCharts(data, container) {
  const now = { at: data.uptime_seconds, load: data.load, values: new Map() };
  if (past.length && now.at <= past[past.length - 1].at) past.length = 0; // the server was restarted
  past.push(now);
  while (now.at - past[0].at > WINDOW_SECONDS || past.length > WINDOW_SECONDS + 1) past.shift();
  if (!container.firstChild) container.append(...CHARTS.map(create));
  CHARTS.forEach((chart, i) => {
    now.values.set(chart, Object.values(chart.lines).map((read) => read(now, past)));
    update(container.children[i], chart);
  });
}
