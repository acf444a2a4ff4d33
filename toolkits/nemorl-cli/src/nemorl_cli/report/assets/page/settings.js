// What the run was told: against the defaults, against another run; the whole config, the machine and the state of git.
import { choice, el, replace } from "./dom.js";
import { table } from "./charts.js";
import { source } from "./source.js";

export async function showConfig(place, state) {
  const { settings, config, environment } = await state.overview(state.run);
  const git = environment.filter(([path]) => path.startsWith("git."));
  const others = state.names.map((name, run) => [String(run), name]).filter(([run]) => Number(run) !== state.run);
  const between = el("div", {});
  const compare = async (other) => {
    if (other === "") return replace(between);
    try {
      const rows = await source.differences(state.run, Number(other));
      return replace(between, rows.length ? table(["setting", state.names[state.run], state.names[Number(other)], ""],
        rows.map((row) => [row.key, row.first, row.second, row.neutral ? "changes no result" : ""])) : el("p", { class: "empty" }, "They differ in nothing that is recorded."));
    } catch (error) {
      return replace(between, el("p", { class: "problem" }, error.message));
    }
  };
  replace(place,
    el("section", {}, el("h2", {}, "Settings that are not the default"),
      settings.rows.length > 0 && table(["setting", "of this run", "default"], settings.rows.map((row) => [row.key, row.value, row.default])),
      settings.problem && el("p", { class: "empty" }, `Defaults are not known: ${settings.problem}.`)),
    others.length > 0 && el("section", {}, el("h2", {}, "Against another run"), choice([["", "choose one"], ...others], "", compare, "Other run"), between),
    git.length > 0 && el("section", {}, el("h2", {}, "State of the source"), table(["", ""], git)),
    el("section", {}, el("h2", {}, "Config"), config ? el("pre", { class: "code" }, config) : el("p", { class: "empty" }, "No config was recorded.")),
    el("section", {}, el("h2", {}, "Machine, versions and plugins"), environment.length ? table(["", ""], environment) : el("p", { class: "empty" }, "Not recorded.")));
}
