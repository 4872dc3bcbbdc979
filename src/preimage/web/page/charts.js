// The D/2 bound beside the noise, and which layers give back which positions.
import { el, percent } from "/static/tokens.js";

const SVG = "http://www.w3.org/2000/svg";
function draw(name, set, text) {
  const one = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(set)) one.setAttribute(key, value);
  if (text !== undefined) one.textContent = text;
  return one;
}

// bounds: for each position half the distance to the nearest other token tried, as a share; measured: D / 2 of the
// whole vocabulary where that is known; noise in percent.
export function boundChart(host, title, tokens, bounds, measured, noise) {
  const wide = Math.max(320, Math.min(1000, host.parentElement.clientWidth || 800));
  const high = 300, left = 58, right = 14, top = 18, bottom = 66;
  const half = tokens.map((_, at) => measured[at] ?? bounds[at] ?? null);
  const most = Math.max(10, noise * 1.15, ...half.filter((one) => one !== null).map((one) => 105 * one));
  const x = (at) => left + ((at + 0.5) * (wide - left - right)) / Math.max(1, tokens.length);
  const y = (value) => top + (high - top - bottom) * (1 - value / most);
  const safe = half.filter((one) => one !== null && 100 * one > noise).length;
  const known = half.filter((one) => one !== null).length;
  const says = `Noise of ${noise} % is below the bound at ${safe} of ${known} positions.`;
  const svg = draw("svg", { viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": `${title}. ${says}` });
  const step = [1, 2, 5, 10, 20, 25, 50, 100, 200].find((one) => most / one <= 6) || 500;
  for (let value = 0; value <= most; value += step) {
    svg.append(draw("line", { class: "grid-line", x1: left, x2: wide - right, y1: y(value), y2: y(value) }));
    svg.append(draw("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, `${value}`));
  }
  svg.append(draw("line", { class: "axis", x1: left, x2: wide - right, y1: y(0), y2: y(0) }));
  const each = Math.ceil((tokens.length * 22) / (wide - left - right));
  tokens.forEach((_, at) => {
    if (at % each === 0) svg.append(draw("text", { x: x(at), y: y(0) + 18, "text-anchor": "middle" }, `${at}`));
    if (half[at] === null) return;
    const kind = measured[at] === undefined ? "bound" : "measured";
    svg.append(draw("line", { class: "grid-line", x1: x(at), x2: x(at), y1: y(0), y2: y(100 * half[at]) }));
    svg.append(draw("circle", { class: kind, cx: x(at), cy: y(100 * half[at]), r: 5 }));
  });
  svg.append(draw("line", { class: "noise-line", x1: left, x2: wide - right, y1: y(noise), y2: y(noise) }));
  svg.append(draw("text", { class: "noise-word", x: wide - right - 4, y: y(noise) - 6, "text-anchor": "end" }, `noise ${noise} %`));
  svg.append(draw("text", { x: left + (wide - left - right) / 2, y: high - 30, "text-anchor": "middle" }, "position in the prompt"));
  svg.append(draw("text", { x: 14, y: top + (high - top - bottom) / 2, "text-anchor": "middle",
    transform: `rotate(-90 14 ${top + (high - top - bottom) / 2})` }, "% of the state's length"));
  svg.append(draw("circle", { class: "measured", cx: left + 6, cy: high - 10, r: 5 }));
  svg.append(draw("text", { x: left + 17, y: high - 6 }, "D/2, measured"));
  svg.append(draw("circle", { class: "bound", cx: left + 126, cy: high - 10, r: 5 }));
  svg.append(draw("text", { x: left + 137, y: high - 6 }, "at most D/2"));
  const caption = el("figcaption", { text: `${title}. ${says} Hollow: half the distance to the nearest token that was tried, so D/2 is no more than that.` });
  const rows = tokens.map((text, at) =>
    el("tr", {}, el("th", { scope: "row", text: `${at}` }), el("td", { text }),
      el("td", { text: measured[at] === undefined ? "" : percent(measured[at]) }),
      el("td", { text: bounds[at] === null || bounds[at] === undefined ? "" : percent(bounds[at]) })));
  const head = el("tr", {}, ...["position", "token", "D/2, measured", "at most"].map((name) => el("th", { scope: "col", text: name })));
  const numbers = el("details", {}, el("summary", { text: "The numbers" }),
    el("div", {}, el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "D/2 at every position" },
      el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows)))));
  numbers.open = host.querySelector("details")?.open ?? false;
  host.replaceChildren(svg, caption, numbers);
  host.hidden = false;
}

export class LayerGrid {
  constructor(title, tokens) {
    this.tokens = tokens;
    const head = el("tr", {}, el("th", { scope: "col", text: "layer" }),
      ...tokens.map((text, at) => el("th", { scope: "col" }, el("span", { text }), el("span", { class: "note", text: `${at}` }))));
    this.body = el("tbody");
    const made = el("table", { class: "grid-table many" }, el("caption", {}, el("span", { text: title })), el("thead", {}, head), this.body);
    this.box = el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": title }, made);
  }

  add(row) {
    const words = { recovered: "recovered", ambiguous: "several fit", likely: "likely", not_recovered: "not recovered" };
    const cells = this.tokens.map((_, at) => {
      const token = row.tokens[at];
      if (!token) return el("td", { class: "bad" }, el("span", { class: "mark", text: "✕" }));
      const sure = row.status === "recovered" || (token.confidence ?? 0) >= 0.9;
      const tone = token.right ? (sure ? "good" : "warn") : "bad";
      const mark = { good: "", warn: "!", bad: "✕" }[tone];
      return el("td", { class: tone }, mark ? el("span", { class: "mark", text: mark }) : null,
        el("span", { text: token.text }), el("span", { class: "note", text: percent(token.other_distance) }));
    });
    this.body.append(el("tr", {}, el("th", { scope: "row" }, el("span", { text: row.layer }),
      el("span", { class: "note", text: words[row.status] || row.status })), ...cells));
  }
}
