// Colours of weights versions. They follow from the sequence number, so they are the same in every
// browser and after a reload. The first seven are plain colours of the Okabe-Ito palette, which
// colour-blind readers can tell apart, the others are two-coloured stripes: 1,351 in all.
const COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442"];
const ANGLES = [45, 135, 90, 0];
const MAX_KNOWN = 1000;
const sequences = new Map();
let unlisted = 1000; // for versions that the server no longer lists

export function learn(versions) {
  for (const { version, sequence } of versions) {
    sequences.delete(version);
    sequences.set(version, sequence);
  }
  while (sequences.size > MAX_KNOWN) sequences.delete(sequences.keys().next().value);
}

export const compare = (a, b) => sequences.get(a) - sequences.get(b);

export function background(index) {
  const n = COLOURS.length;
  if (index < n) return COLOURS[index];
  const stripe = (index - n) % (n * (n - 1) * ANGLES.length * 8);
  const round = Math.floor(stripe / n);
  const first = COLOURS[stripe % n];
  const second = COLOURS[(stripe + 1 + (round % (n - 1))) % n];
  const turn = Math.floor(round / (n - 1));
  const width = 3 + Math.floor(turn / ANGLES.length) / 2;
  return `repeating-linear-gradient(${ANGLES[turn % ANGLES.length]}deg, ${first} 0 ${width}px, ${second} ${width}px ${2 * width}px)`;
}

export function paint(element, version) {
  if (version !== null && !sequences.has(version)) sequences.set(version, unlisted++);
  const wanted = version === null ? "var(--soft)" : background(sequences.get(version));
  if (element.painted !== wanted) element.style.background = element.painted = wanted;
}
