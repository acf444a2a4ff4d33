// One step: seconds of its phases, and its responses side by side, by tokens, with the weights that made them.
import { choice, colour, el, replace, short } from "./dom.js";
import { source } from "./source.js";

export async function showTimeline(place, state) {
  const [{ steps }, overview] = await Promise.all([state.steps(state.run), state.overview(state.run)]);
  const own = steps.filter((step) => step.split === "train");
  if (!own.length) {
    replace(place, el("p", { class: "empty" }, "No training rollouts were recorded, or none yet."));
    return async () => showTimeline(place, state);
  }
  const asked = own.findIndex((step) => step.step === Number(state.params.step));
  let index = asked < 0 ? own.length - 1 : asked;
  const slider = el("input", { type: "range", min: "0", max: String(own.length - 1), "aria-label": "Step" }), number = el("output", {});
  const body = el("div", {});
  let order = "";
  const draw = async () => {
    const { step } = own[index];
    slider.value = String(index);
    replace(number, `step ${step}`);
    state.remember({ step });
    const found = await source.responses(state.run, { split: "train", step, only: [], search: "", sort: order, descending: true, limit: 512, offset: 0 });
    if (own[index].step === step) replace(body, phasesOf(overview.time.chart, step), rowsOf(found, step, state));
  };
  slider.addEventListener("input", () => { index = Number(slider.value); draw(); });
  replace(place, el("div", { class: "tools" }, el("span", { class: "stepper" }, slider, number),
    el("label", {}, "Sort ", choice([["", "by group"], ["total_tokens", "by length"], ["reward", "by reward"]], "", (value) => { order = value; draw(); }, "Sort by"))), body);
  await draw();
  const key = (name) => {
    if (name !== "ArrowLeft" && name !== "ArrowRight") return false;
    index = Math.max(0, Math.min(own.length - 1, index + (name === "ArrowLeft" ? -1 : 1)));
    draw();
    return true;
  };
  return Object.assign(async () => null, { key });
}

function phasesOf(chart, step) {
  const at = chart ? chart.steps.indexOf(step) : -1;
  if (at < 0) return el("p", { class: "empty" }, "No seconds of this step's phases are drawn here.");
  const phases = chart.series.map(({ label, values }, index) => ({ label, seconds: values[at], index })).filter(({ seconds }) => seconds > 0);
  const whole = phases.reduce((sum, { seconds }) => sum + seconds, 0);
  const bar = el("div", { class: "bar" }, phases.map(({ label, seconds, index }) => {
    const part = el("i", { class: `c${(index % 8) + 1}`, title: `${label}: ${short(seconds)} s` });
    part.style.width = `${(100 * seconds) / whole}%`;
    return part;
  }));
  return el("section", {}, el("h2", {}, `Seconds of the step: ${short(whole)}`), bar, el("div", { class: "chips" },
    phases.map(({ label, seconds, index }) => el("span", { class: "chip" }, el("i", { class: `dot c${(index % 8) + 1}` }), `${label} `, el("b", {}, `${short(seconds)} s`)))));
}

function rowsOf({ rows, total }, step, state) {
  const longest = Math.max(1, ...rows.map((row) => row.total_tokens ?? 0));
  const versions = [...new Set(rows.flatMap((row) => row.weight_versions ?? []))].sort((a, b) => a - b);
  const shade = (version) => colour(versions.indexOf(version));
  const made = rows.map((row) => {
    const share = (tokens) => `calc((100% - 100px) * ${(tokens ?? 0) / longest})`; // the rest is for the marks
    const used = row.weight_versions ?? [], rest = Math.max(0, (row.total_tokens ?? 0) - (row.prompt_tokens ?? 0));
    const prompt = el("i", { class: "prompt-part" }), wrote = el("i", {});
    prompt.style.width = share(row.prompt_tokens);
    wrote.style.width = share(rest);
    wrote.style.background = used.length > 1 ? `linear-gradient(90deg, ${used.map(shade).join(", ")})` : shade(used[0] ?? versions[0]);
    const said = `${row.sample_id}: ${row.prompt_tokens} tokens of prompt, ${row.tokens} of the policy, ${row.num_turns} turns, reward ${short(row.reward)}, weights ${used.join(", ")}`;
    return el("a", { class: `lane ${row.right ? "right" : "wrong"}`, title: said, "aria-label": said, href: state.link("samples", { split: row.split, step, id: row.sample_id }) },
      prompt, wrote, row.finish_reason === "length" && el("span", { class: "mark bad" }, "cut"), row.num_turns > 1 && el("span", { class: "dim" }, `${row.num_turns} turns`));
  });
  return el("section", {}, el("h2", {}, `Responses of the step (${rows.length}${total > rows.length ? ` of ${total}` : ""})`),
    el("p", { class: "empty" }, `Length is tokens, the longest ${longest.toLocaleString("en")}; grey is the prompt. Records hold no clock times of single responses. Colour is the version of the weights; where several made one response, from the oldest to the newest:`),
    el("div", { class: "chips" }, versions.map((version) => {
      const dot = el("i", { class: "dot" });
      dot.style.background = shade(version);
      return el("span", { class: "chip" }, dot, `weights ${version}`);
    })),
    el("div", { class: "lanes" }, made));
}
