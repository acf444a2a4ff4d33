// Numbers of tokens as heat: what is shown, what it means, and where its scale ends.
import { el, short } from "./dom.js";

const at = (values, place) => values?.[place] ?? null;
const minus = (one, other) => (one === null || other === null ? null : one - other);
const chosenOnly = (get) => (sequence, place) => (sequence.mask[place] ? get(sequence, place) : null);

// name -> {label, meaning, value(sequence, place), low, high: ends of the scale, or unset: the largest of the response}
export const HEATS = {
  none: { label: "no heat", meaning: "" },
  mask: { label: "mask", meaning: "tokens that the policy chose; all others train nothing", value: (s, p) => s.mask[p], high: 1 },
  logprob: {
    label: "log-prob", meaning: "how unlikely the sampler found the token: minus its log-prob, in nats",
    value: chosenOnly((s, p) => { const found = at(s.generation_logprobs, p); return found === null ? null : -found; }), high: 6,
  },
  mismatch: {
    label: "mismatch", meaning: "|trainer's log-prob before the update - sampler's|, in nats",
    value: chosenOnly((s, p) => { const found = minus(at(s.old_logprobs, p), at(s.generation_logprobs, p)); return found === null ? null : Math.abs(found); }),
    floor: 1e-6,
  },
  ratio: {
    label: "ratio trainer / sampler", meaning: "probability before the update over the sampler's: blue above 1, orange below",
    value: chosenOnly((s, p) => { const found = minus(at(s.old_logprobs, p), at(s.generation_logprobs, p)); return found === null ? null : Math.exp(found) - 1; }),
    floor: 1e-6, about: 1,
  },
  update: {
    label: "ratio after / before", meaning: "probability after the step's updates over that before: blue above 1, orange below",
    value: chosenOnly((s, p) => { const found = minus(at(s.policy_logprobs, p), at(s.old_logprobs, p)); return found === null ? null : Math.exp(found) - 1; }),
    floor: 1e-6, about: 1,
  },
  reference: {
    label: "against the reference", meaning: "log-prob of the policy less that of the reference, in nats: blue where the policy likes it more",
    value: chosenOnly((s, p) => minus(at(s.old_logprobs ?? s.generation_logprobs, p), at(s.reference_logprobs, p))), floor: 1e-6,
  },
  gradient: {
    label: "weight of the gradient", meaning: "weight in the loss times advantage: blue is pushed up, orange down",
    value: (s, p, row) => { const weight = at(s.loss_weights, p); return weight === null ? null : weight * (at(s.advantages, p) ?? row.advantage ?? 0); }, floor: 1e-12,
  },
};

// Values of all tokens of a record under a heat, by sequence, and the end of their scale.
export function measured(row, name) {
  const heat = HEATS[name];
  const values = row.sequences.map((sequence) => sequence.token_ids.map((_, place) => heat.value(sequence, place, row)));
  const known = values.flat().filter((value) => value !== null);
  const largest = known.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
  return { values, high: heat.high ?? Math.max(largest, heat.floor ?? 0), known: known.length > 0, largest };
}

export function legend(name, found) {
  if (name === "none") return null;
  const heat = HEATS[name];
  if (!found.known) return el("span", { class: "legend" }, `${heat.label}: not recorded here. records.trainer_logprobs: true keeps the trainer's log-probs.`);
  const end = heat.about === undefined ? short(found.high) : `${short(1 + found.high)} or ${short(1 - found.high)}`;
  return el("span", { class: "legend" }, heat.meaning, name === "mask" ? "" : `. Full colour: ${end}`, name === "logprob" ? `; largest ${short(found.largest)}` : "");
}

export function tokenElement(sequence, number, place, text, values, high) {
  const value = values?.[place] ?? null;
  const made = el("span", { class: "tok", "data-at": `${number}:${place}` }, text);
  if (value !== null && value !== 0) {
    const strength = Math.min(1, Math.abs(value) / high);
    made.style.setProperty("--heat", `${Math.round(65 * strength)}%`);
    made.classList.add(value < 0 ? "below" : "above");
  }
  return made;
}

// All that is known of one token, in one line.
export function readout(row, number, place) {
  const s = row.sequences[number], said = [`token ${number ? `${number}:` : ""}${place}`, `id ${s.token_ids[place]}`];
  const names = [["generation_logprobs", "sampler"], ["old_logprobs", "trainer before"], ["policy_logprobs", "trainer after"],
    ["reference_logprobs", "reference"], ["advantages", "advantage"], ["loss_weights", "weight in the loss"]];
  if (!s.mask[place]) return [...said, "not chosen by the policy"].join(" · ");
  const run = (s.version_runs ?? []).filter(([start]) => start <= place).at(-1);
  if (run) said.push(`weights of step ${run[1]}`);
  for (const [name, label] of names) if (at(s[name], place) !== null) said.push(`${label} ${short(s[name][place])}`);
  return said.join(" · ");
}
