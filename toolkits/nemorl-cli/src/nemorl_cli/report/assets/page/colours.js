// Which colour and dash a curve has. A name has its place in the palette wherever it is shown, and after a reload.
import { cssValue, el } from "./dom.js";

const PALETTE = 8; // --c1 to --c8 of page.css

// FNV-1a, of 32 bits: the same for a name in every browser.
function hashed(name) {
  let hash = 0x811c9dc5;
  for (let at = 0; at < name.length; at++) hash = Math.imul(hash ^ name.charCodeAt(at), 0x01000193);
  return (hash ^ (hash >>> 16)) >>> 0;
}

// A place for each of the names, all different: the one that its hash says. Where several names have the same, the first
// by the alphabet keeps it, and the others get those that are free after the rest have theirs. Past the palette follow
// second places, and so on.
export function placesOf(names) {
  const found = new Array(names.length), taken = new Set(), homeless = [];
  const take = (at, place) => { found[at] = place; taken.add(place); };
  const inOrder = [...names.keys()].sort((a, b) => (names[a] < names[b] ? -1 : names[a] > names[b] ? 1 : a - b));
  for (const at of inOrder) {
    const home = hashed(names[at]) % PALETTE;
    if (taken.has(home)) homeless.push(at);
    else take(at, home);
  }
  for (const at of homeless) {
    let tried = 0;
    const place = () => PALETTE * Math.floor(tried / PALETTE) + (hashed(names[at]) + tried) % PALETTE;
    while (taken.has(place())) tried++;
    take(at, place());
  }
  return found;
}

// How often the palette was gone through before a place.
export const turnOf = (place) => Math.floor(place / PALETTE);

// The colour of a place, in a style. Beyond the palette each hue is a golden angle from the one before.
export const hue = (place) => (place < PALETTE ? `var(--c${place + 1})` : `hsl(${(place * 137.5) % 360} 55% 50%)`);
// The same for a canvas, which knows no variables.
export const colour = (place) => (place < PALETTE ? cssValue(`--c${place + 1}`) : hue(place));

// Lengths of line and gap: 0 is a solid line, 1 is dashed, each number more puts one dot between the dashes.
export const dashed = (number) => (number ? [8, 4, ...new Array(number - 1).fill([2, 3]).flat()] : []);

// The same as a background, for a legend.
export function lineKey(stroke, dash) {
  if (!dash?.length) return stroke;
  let from = 0;
  const stops = dash.map((length, index) => `${index % 2 ? "transparent" : stroke} ${from}px ${(from += length)}px`);
  return `repeating-linear-gradient(90deg, ${stops.join(", ")})`;
}

// An element with this background.
export function swatch(background, props) {
  const made = el("i", props);
  made.style.background = background;
  return made;
}
