// The page: its tabs, its forms, and what is made of the events of a job.
import { boundChart, LayerGrid } from "/static/charts.js";
import { dropped, upload } from "/static/files.js";
import { announce, ask, cancel, complain, follow, isBusy } from "/static/job.js";
import { showRuns } from "/static/runs.js";
import { el, notice, percent, seconds, table, Tokens } from "/static/tokens.js";

const find = (id) => document.getElementById(id);
const known = { model: null, limits: {}, name: "" };

// --- tabs -------------------------------------------------------------------------------------

const tabs = [...document.querySelectorAll("[role=tab]")];
const typedIn = ["prompt", "noise", "layers"];

function choose(tab, focus = true) {
  for (const one of tabs) {
    const on = one === tab;
    one.setAttribute("aria-selected", on ? "true" : "false");
    one.tabIndex = on ? 0 : -1;
    find(one.getAttribute("aria-controls")).hidden = !on;
  }
  const name = tab.id.slice("tab-".length);
  find("typed").hidden = !typedIn.includes(name);
  find("layer-field").hidden = name === "layers";
  if (focus) tab.focus();
  if (name === "runs") showRuns(find("out-runs"));
  if (name === "noise") drawBounds();
}
tabs.forEach((tab, at) => {
  tab.addEventListener("click", () => choose(tab));
  tab.addEventListener("keydown", (event) => {
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    choose(tabs[(to + tabs.length) % tabs.length]);
  });
});

// --- the model --------------------------------------------------------------------------------

const STATES = {
  loading: "is being loaded", warming: "is loaded; its noise is being measured", ready: "is ready", failed: "could not be loaded",
};

function fill(select, layers, first) {
  const chosen = select.value;
  const options = layers.map((layer) => el("option", { value: layer, text: layer === "0" ? "0 (what enters block 1)" : layer }));
  select.replaceChildren(...(first ? [el("option", { value: "", text: first })] : []), ...options);
  select.value = layers.includes(chosen) ? chosen : first ? "" : known.model.middle;
}

async function look() {
  let state;
  try {
    state = await ask("/api/state");
  } catch (error) {
    find("model").textContent = `${error.message} ${error.hint || ""}`;
    setTimeout(look, 3000);
    return;
  }
  const model = state.model;
  known.limits = state.limits;
  const size = model.layers ? `, ${model.layers.length - 2} blocks, ${model.dtype}, ${model.device}` : "";
  const text = `${model.name} ${STATES[model.state]}${size}. ${model.problem.message || ""} ${model.problem.hint || ""}`.trim();
  if (find("model").textContent !== text) find("model").textContent = text;
  if (model.layers && !known.model) {
    known.model = model;
    known.name = `${model.name}, ${model.dtype}`;
    fill(find("layer"), model.layers, "");
    fill(find("file-layer"), model.layers, "what the bundle says");
  }
  const others = state.jobs.length - (isBusy() ? 1 : 0);
  find("others").textContent = others > 0 ? `${others} ${others === 1 ? "job" : "jobs"} of other pages are asked for.` : "";
  setTimeout(look, model.state === "ready" || model.state === "failed" ? 5000 : 700);
}

// --- results ----------------------------------------------------------------------------------

const TITLES = {
  recovered: ["Recovered: this prompt, and no other.", "good"],
  ambiguous: ["Several prompts made, or could have made, these states.", "warn"],
  likely: ["A likely reading, not a proof.", "warn"],
  not_recovered: ["No: this is not known to be the state of any prompt.", "bad"],
};

function verdict(event) {
  const [title, tone] = TITLES[event.status];
  const same = event.exact === null ? "" : event.exact ? "It is the prompt that was run. " : "It is not the prompt that was run. ";
  const about = `${same}${event.reason || event.uniqueness || ""}`;
  const box = notice(title, about, tone);
  box.setAttribute("role", "status");
  return box;
}

function text(event) {
  if (event.text === null) return null;
  const title = event.status === "not_recovered" ? "Most likely text, for what it is worth" : "Text";
  return el("figure", { class: "text" }, el("figcaption", { text: title }), el("pre", { tabindex: "0", text: event.text }));
}

function others(event) {
  if (event.status !== "ambiguous") return null;
  return el("div", {}, el("p", { text: `${event.fitting} prompts fit; among them:` }), el("ul", {}, ...event.alternatives.map((one) => el("li", { text: one }))));
}

function byPosition(event) {
  const rows = event.tokens.map((token, at) => [
    `${at}`, token.text, token.confidence === null ? "" : `${(100 * token.confidence).toFixed(1)} %`,
    percent(token.distance), percent(token.allowed), token.other ?? "", percent(token.other_distance),
  ]);
  const columns = ["position", "token", "sure", "distance", "allowed", "nearest other tried", "its distance"];
  const caption = "Every position; distances in percent of the state's length.";
  return el("details", {}, el("summary", { text: "Position by position" }), el("div", {}, table(caption, columns, rows)));
}

// What each method took, as it is counted.
class Counts {
  constructor(length) {
    this.length = length;
    this.rows = new Map();
    this.box = el("div");
  }

  set(by, said) {
    this.rows.set(by, { ...this.rows.get(by), ...said });
    const rows = [...this.rows.values()].map((row) => [
      row.name, `${row.verified ?? 0} of ${this.length}`, `${row.passes ?? 0}`,
      row.forward_tokens === undefined ? "" : (row.forward_tokens / this.length).toFixed(1), seconds(row.seconds ?? 0), row.note ?? "",
    ]);
    const columns = ["method", "tokens settled", "passes", "in plain passes over the prompt", "time", ""];
    this.box.replaceChildren(table("Passes of the model, counted here", columns, rows));
  }
}

// One prompt on its way: its tokens, its counts, and in the end what it is.
function prompting(out, title) {
  let tokens = null, slow = null, counts = null, place = out;
  const first = { proposed: null, settled: null };
  return {
    prompt(event) {
      place = event.of > 1 ? el("section", { "aria-label": `Prompt ${event.index}` }, el("h2", { text: `Prompt ${event.index}` })) : el("div");
      out.append(place);
      tokens = new Tokens(title, event.length);
      slow = null;
      counts = new Counts(event.length);
      counts.set("fast", { name: "preimage" });
      place.append(tokens.box, counts.box);
    },
    settled(event) {
      if (event.by === "fast") {
        if (first.proposed === null) first.proposed = event.after;
        if (event.count && first.settled === null) {
          first.settled = event.after;
          out.dataset.first = event.after.toFixed(0);
        }
      }
      (event.by === "fast" ? tokens : slow).settled(event.count, event.changed);
      counts.set(event.by, { verified: event.count });
      find("now").textContent = `${event.count} of ${event.length} tokens settled`;
    },
    count(event) {
      const { passes, forward_tokens } = event;
      counts.set(event.by, { passes, forward_tokens, seconds: event.seconds });
    },
    result(event) {
      const verified = event.status === "recovered" || event.status === "ambiguous";
      tokens.finish(event.tokens, verified);
      const what = event.status === "recovered" ? "all verified" : event.status === "not_recovered" ? "not verified" : event.status;
      tokens.say(`${event.tokens.length} tokens, ${what}.`);
      const soon = first.settled === null ? "" : `first token after ${seconds(first.settled / 1000)}`;
      const { passes, forward_tokens } = event;
      const count = verified ? event.tokens.length : tokens.count;
      counts.set("fast", { verified: count, passes, forward_tokens, seconds: event.seconds, note: soon });
      const shown = [verdict(event), text(event), others(event), byPosition(event)].filter((one) => one);
      tokens.box.before(shown[0]);
      counts.box.after(...shown.slice(1));
      announce(`${TITLES[event.status][0]} ${event.text ?? ""}`.slice(0, 300));
    },
    sipit(event) {
      const way = event.way === "published" ? "SIPIT as published" : "SIPIT on our prefix cache";
      slow = new Tokens(`${way}, on the same states`, counts.length);
      counts.set("sipit", { name: way });
      counts.box.before(slow.box);
    },
    sipit_end(event) {
      const { passes, forward_tokens, verified } = event;
      const note = event.status === "stopped" ? "stopped, its time was over" : event.exact ? "all of the prompt" : event.status;
      counts.set("sipit", { passes, forward_tokens, seconds: event.seconds, verified, note });
      slow.say(`${verified} of ${event.length} tokens, ${passes} passes; ${note}.`);
    },
  };
}

// --- jobs -------------------------------------------------------------------------------------

const typed = () => ({ prompt: find("prompt").value, layer: find("layer").value });
const layerName = () => `layer ${find("layer").value || "in the middle"}`;

find("go-prompt").addEventListener("click", () => {
  const out = find("out-prompt");
  out.replaceChildren();
  delete out.dataset.first;
  const sipit_seconds = Number(find("sipit-seconds").value) || 15;
  const asked = { kind: "prompt", ...typed(), sipit: find("sipit").value, sipit_seconds };
  follow(asked, out, prompting(out, `Recovered from ${layerName()} of ${known.name}`));
});
find("cancel").addEventListener("click", cancel);
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && isBusy()) cancel();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && event.target === find("prompt"))
    document.querySelector("[role=tabpanel]:not([hidden]) .go")?.click();
});

const bounds = { of: "", tokens: [], nearest: [], measured: {} };
const boundsOf = () => JSON.stringify([find("prompt").value, find("layer").value]);

function drawBounds() {
  if (bounds.tokens.length && bounds.of === boundsOf())
    boundChart(find("chart"), `D/2 at ${layerName()} of ${known.name}`, bounds.tokens,
      bounds.tokens.map((_, at) => (bounds.nearest[at] ? bounds.nearest[at] / 2 : null)), bounds.measured, Number(find("percent").value));
  else find("chart").hidden = true;
}

function keepTokens(event) {
  if (bounds.of !== boundsOf()) Object.assign(bounds, { of: boundsOf(), nearest: [], measured: {} });
  bounds.tokens = event.truth;
}

find("go-noise").addEventListener("click", () => {
  const out = find("out-noise");
  out.replaceChildren();
  const noise = Number(find("percent").value);
  const shown = prompting(out, `Read from ${layerName()} of ${known.name}, noise ${noise} %`);
  follow({ kind: "noise", ...typed(), percent: noise }, out, {
    ...shown,
    prompt(event) {
      keepTokens(event);
      shown.prompt(event);
    },
    bounds(event) {
      bounds.nearest = event.nearest;
      drawBounds();
    },
  });
});
find("go-margins").addEventListener("click", () => {
  const out = find("out-noise");
  out.replaceChildren();
  follow({ kind: "margins", ...typed() }, out, {
    prompt: keepTokens,
    margin(event) {
      bounds.measured[event.position] = event.share / 2;
      drawBounds();
    },
  });
});
find("percent").addEventListener("input", () => {
  find("percent-out").textContent = `${find("percent").value} %`;
  drawBounds();
});
for (const id of ["prompt", "layer"]) find(id).addEventListener("change", drawBounds);
addEventListener("resize", () => find("chart").hidden || drawBounds());

find("go-layers").addEventListener("click", () => {
  const out = find("out-layers");
  out.replaceChildren();
  let grid = null, whole = 0, all = 0;
  follow({ kind: "layers", prompt: find("prompt").value }, out, {
    prompt(event) {
      grid = new LayerGrid(`What each layer of ${known.name} gives back`, event.truth);
      out.append(grid.box);
    },
    row(event) {
      grid.add(event);
      all += 1;
      whole += event.exact ? 1 : 0;
      out.dataset.whole = `${whole} of ${all}`;
      announce(`Layer ${event.layer}: ${event.status.replace("_", " ")}`);
    },
  }).then((state) => {
    if (all) out.prepend(notice(`The whole prompt from ${whole} of ${all} layers${state === "done" ? "" : ", so far"}.`, "", whole === all ? "good" : "warn"));
  });
});

// --- files ------------------------------------------------------------------------------------

let files = [];
function take(some) {
  files = [...some];
  const shown = files.slice(0, 8).map((file) => file.name.slice(0, 80)).join(", ");
  find("chosen").textContent = files.length ? `${files.length} ${files.length === 1 ? "file" : "files"}: ${shown}` : "Nothing is chosen.";
  find("go-file").disabled = !files.length || isBusy();
  find("go-file").dataset.was = files.length ? "on" : "off";
}
find("files").addEventListener("change", (event) => take(event.target.files));
const drop = find("drop");
for (const kind of ["dragenter", "dragover"])
  drop.addEventListener(kind, (event) => {
    event.preventDefault();
    drop.classList.add("over");
  });
drop.addEventListener("dragleave", () => drop.classList.remove("over"));
drop.addEventListener("drop", async (event) => {
  event.preventDefault();
  drop.classList.remove("over");
  take(await dropped(event.dataTransfer));
});
for (const kind of ["dragover", "drop"]) addEventListener(kind, (event) => event.preventDefault());

find("go-file").addEventListener("click", async () => {
  const out = find("out-file");
  out.replaceChildren();
  find("go-file").disabled = true;
  let id;
  try {
    id = await upload(files, known.limits.upload, announce);
  } catch (error) {
    complain(out, error);
    announce(error.message);
    return;
  } finally {
    find("go-file").disabled = false;
  }
  const asked = {
    kind: "file", upload: id, layer: find("file-layer").value, key: find("key").value,
    observe: find("observe").value, positions: find("positions").value, any_model: find("any-model").checked,
  };
  const shown = prompting(out, `Read from the file by ${known.name}`);
  follow(asked, out, {
    ...shown,
    file(event) {
      const some = event.read < event.prompts ? `; the first ${event.read} are read` : "";
      out.append(el("p", { text: `${event.prompts} ${event.prompts === 1 ? "prompt" : "prompts"} at layer ${event.layer}${some}.` }));
    },
  });
});

look();
