// Run folders: what each was, its pages, and some beside one another.
import { ask, complain } from "/static/job.js";
import { el, notice, table } from "/static/tokens.js";

const SHOWN = ["command", "state", "model", "model dtype", "layer", "layers", "results", "statuses"];

export async function showRuns(out) {
  let runs, shown;
  try {
    ({ runs, shown } = await ask("/api/runs"));
  } catch (error) {
    out.replaceChildren();
    complain(out, error);
    return;
  }
  out.replaceChildren();
  if (!shown) {
    out.append(notice("No folder of runs is shown.", "Start preimage serve with --runs DIR.", "plain"));
    return;
  }
  if (!runs.length) {
    out.append(notice("There is no run in this folder yet.", "Commands make one with --out DIR.", "plain"));
    return;
  }
  const picked = new Set();
  const beside = el("div", { "aria-live": "polite" });
  const rows = runs.map((run, index) => {
    const box = el("input", { type: "checkbox", "aria-label": `Compare ${run.shown}` });
    box.addEventListener("change", () => {
      if (box.checked) picked.add(index);
      else picked.delete(index);
      compare(beside, [...picked].map((one) => runs[one]));
    });
    const links = run.name === null ? [] : run.pages.map((page) =>
      el("a", { href: `/runs/${encodeURIComponent(run.name)}/${page}`, target: "_blank", rel: "noopener noreferrer", text: page }));
    const facts = run.facts;
    return [run.shown, facts.command, facts.state, facts.model, facts["model dtype"], facts.layer ?? facts.layers, facts.statuses ?? facts.results,
      el("span", { class: "whole", text: run.changed }), el("span", { class: "runs-links" }, ...links), box];
  });
  const columns = ["run", "command", "state", "model", "type", "layers", "results", "changed (UTC)", "pages", "compare"];
  out.append(table("Runs, the latest first. Pages open in a tab of their own and can ask for nothing.", columns, rows), beside);
}

function compare(host, runs) {
  host.replaceChildren();
  if (runs.length < 2) return;
  const names = [...new Set([...SHOWN, ...runs.flatMap((run) => Object.keys(run.facts))])];
  const rows = names
    .map((name) => [name, ...runs.map((run) => run.facts[name] ?? "")])
    .filter((row) => row.slice(1).some((value) => value))
    .map((row) => {
      const same = row.slice(1).every((value) => value === row[1]);
      return [same ? row[0] : `${row[0]} (differs)`, ...row.slice(1)];
    });
  host.append(table(`${runs.length} runs beside one another`, ["", ...runs.map((run) => run.shown)], rows));
}
