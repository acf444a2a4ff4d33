// One response: its numbers, what its environment's plugins make of it, and its turns with their authors, as text or
// token by token.
import { choice, el, replace, short, visible } from "./dom.js";
import { blocks } from "./charts.js";
import { shownItem } from "./media.js";
import { HEATS, legend, measured, readout, tokenElement } from "./tokens.js";

const MOST_TOKENS = 6000; // of a turn as elements; the rest is one text
const MOST_CHARACTERS = 60000; // of a turn before it is asked for
const settings = { heat: "none" };

export function showTranscript(place, run, row, words) {
  const body = el("div", { class: "turns" }), told = el("div", { class: "readout", "aria-live": "polite" });
  const draw = () => drawTurns(body, told, run, row, words);
  const heats = choice(Object.entries(HEATS).map(([name, { label }]) => [name, label]), settings.heat, (value) => { settings.heat = value; draw(); }, "Heat");
  replace(place, factsOf(row), row.shown?.length > 0 && el("div", { class: "shown" }, blocks(row.shown)),
    el("div", { class: "tools" }, el("label", {}, "Colour tokens by ", heats)), body, told);
  draw();
}

function factsOf(row) {
  const facts = [["reward", row.reward], ["advantage", row.advantage], ["tokens", row.tokens], ["turns", row.num_turns], ["seconds", row.seconds], ["KL to the reference", row.kl],
    ["mismatch", row.mismatch], ["gradient weight", row.gradient], ...Object.entries(row.components)];
  const verdict = row.right ? "right" : "wrong";
  return el("div", { class: "verdicts" },
    el("h3", {}, row.sample_id),
    el("div", { class: "chips" },
      el("span", { class: `chip ${verdict}` }, verdict),
      row.finish_reason === "length" && el("span", { class: "chip wrong" }, "cut by the limit"),
      row.filtered && el("span", { class: "chip mid" }, `trains nothing: ${row.filtered}`),
      row.outcome && !["scored", "truncated"].includes(row.outcome) && el("span", { class: "chip wrong" }, row.outcome.replaceAll("_", " "), row.cause && `: ${row.cause}`),
      row.valid === false && el("span", { class: "chip wrong" }, "has no verdict"),
      facts.filter(([, value]) => value !== null && value !== undefined).map(([name, value]) => el("span", { class: "chip" }, `${name} `, el("b", {}, short(value)))),
      row.weight_versions?.length > 0 && el("span", { class: "chip" }, "weights ", el("b", {}, row.weight_versions.join(", ")))),
    (row.answer || row.given) && el("div", { class: "answer" }, row.answer && ["expected ", el("code", {}, row.answer)], row.given && [" found ", el("code", {}, row.given)]),
    Object.keys(row.metrics).length > 0 && el("details", {}, el("summary", {}, "Numbers of the environment"),
      el("div", { class: "chips" }, Object.entries(row.metrics).map(([name, value]) => el("span", { class: "chip" }, `${name} `, el("b", {}, short(value)))))));
}

function drawTurns(body, told, run, row, words) {
  const heat = settings.heat, found = heat === "none" ? null : measured(row, heat);
  const several = row.sequences.length > 1;
  const turns = row.turns.length ? row.turns : [{ author: "prompt", text: row.prompt, pieces: beginning(row) }, { author: "policy", text: row.response }];
  replace(body, legend(heat, found), turns.map((turn) => el("article", { class: `turn by-${AUTHORS.includes(turn.author) ? turn.author : "environment"}` },
    el("div", { class: "author" }, turn.author, several && ` · sequence ${turn.sequence}`,
      turn.start !== undefined && turn.start !== null && ` · ${turn.stop - turn.start} tokens`,
      turn.began_s !== null && turn.began_s !== undefined && ` · ${(turn.ended_s - turn.began_s).toFixed(2)} s, from ${turn.began_s.toFixed(2)} s`,
      turn.reward !== null && turn.reward !== undefined && ` · earned ${short(turn.reward)}`),
    found && row.sequences[turn.sequence] ? tokensOf(run, row, turn, found) : textOf(turn, words, (item) => shownItem(run, item, item.tokens), row.media))));
  body.onmouseover = body.onclick = (event) => {
    const where = event.target.dataset?.at;
    if (where) replace(told, readout(row, ...where.split(":").map(Number)));
  };
  replace(told, found?.known ? "Point at a token for its numbers." : "");
}

const AUTHORS = ["prompt", "policy", "environment"];

// A prompt whose turns are not known: its images and sounds, then its text.
function beginning(row) {
  const count = row.prompt_media ?? 0;
  return count ? [...Array(count).keys(), row.prompt] : null;
}

function tokensOf(run, row, turn, found) {
  const sequence = row.sequences[turn.sequence], ids = sequence.token_ids;
  const stop = Math.min(turn.stop, turn.start + MOST_TOKENS), made = [];
  for (let place = turn.start; place < stop; place++) {
    const item = row.media?.[-1 - ids[place]];
    if (item) {
      let end = place + 1;
      while (end < Math.min(stop, place + item.tokens) && ids[end] === ids[place]) end++;
      made.push(shownItem(run, item, end - place));
      place = end - 1;
      continue;
    }
    const text = sequence.texts?.[place] ?? `[${ids[place]}]`;
    made.push(tokenElement(sequence, turn.sequence, place, text === "" ? "∅" : text, found.values[turn.sequence], found.high));
  }
  return el("div", { class: "text tokens", dir: "auto" }, made, stop < turn.stop && el("span", { class: "dim" }, ` … ${turn.stop - stop} more tokens`));
}

function textOf(turn, words, shown, media) {
  const pieces = turn.pieces ?? [turn.text ?? ""];
  return el("div", { class: "text", dir: "auto" }, pieces.map((piece) => (typeof piece === "number" ? shown(media[piece]) : piece && wordsOf(piece, words))),
    pieces.every((piece) => piece === "") && el("span", { class: "dim" }, "(empty)"));
}

function wordsOf(text, words) {
  const rest = text.length - MOST_CHARACTERS;
  const more = rest > 0 && el("button", { onclick: () => more.replaceWith(visible(text.slice(MOST_CHARACTERS))) }, `show ${rest.toLocaleString("en")} more characters`);
  return [...marked(text.slice(0, MOST_CHARACTERS), words), more];
}

// The text with the words that were searched for marked.
function marked(text, words) {
  const wanted = words.filter((word) => word.length > 1).map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  if (!wanted.length) return [text];
  const pattern = new RegExp(`(${wanted.join("|")})`, "gi");
  return text.split(pattern).slice(0, 4000).map((part, index) => (index % 2 ? el("mark", {}, part) : part));
}
