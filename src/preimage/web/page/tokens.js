// Elements, and a prompt as its tokens. Every text of somebody else goes through textContent, here.

export function el(name, set = {}, ...children) {
  const one = document.createElement(name);
  for (const [key, value] of Object.entries(set)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "text") one.textContent = value;
    else if (key === "class") one.className = value;
    else one.setAttribute(key, value === true ? "" : value);
  }
  one.append(...children.filter((child) => child !== null && child !== undefined));
  return one;
}

export const percent = (share) =>
  share === null || share === undefined ? "" : share < 1e-4 ? `${(100 * share).toExponential(1)} %` : `${(100 * share).toPrecision(3)} %`;

export const seconds = (value) => (value < 10 ? `${value.toFixed(2)} s` : `${value.toFixed(0)} s`);

const MARKS = { good: ["✓", "good"], warn: ["!", "caution"], bad: ["✕", "bad"] };

export function notice(title, text, tone) {
  const mark = MARKS[tone];
  const head = el("p", {}, mark ? el("span", { class: "mark", "aria-hidden": "true", text: mark[0] }) : null,
    el("strong", { text: title }));
  return el("div", { class: `notice ${tone}`, role: tone === "bad" ? "alert" : null }, head,
    text ? el("p", { text }) : null);
}

// A table that scrolls in its own box, by the keyboard too.
export function table(caption, columns, rows, kind = "") {
  const head = el("tr", {}, ...columns.map((name) => el("th", { scope: "col", text: name })));
  const body = rows.map((row) =>
    el("tr", {}, ...row.map((cell, at) => {
      const inside = cell instanceof Node ? cell : document.createTextNode(cell ?? "");
      return at ? el("td", {}, inside) : el("th", { scope: "row" }, inside);
    })));
  const made = el("table", { class: kind }, el("caption", {}, el("span", { text: caption })), el("thead", {}, head), el("tbody", {}, ...body));
  return el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": caption }, made);
}

// How sure a token is, by the same four levels as in reports.
const level = (sure) => (sure >= 0.99 ? 0 : sure >= 0.9 ? 1 : sure >= 0.5 ? 2 : 3);

export class Tokens {
  constructor(title, length) {
    this.count = 0;
    this.length = length;
    this.line = el("p", { class: "tokens", tabindex: "0" });
    this.state = el("p", { class: "key" });
    this.spans = [];
    this.box = el("div", { class: "text" }, el("h3", { text: title }), this.line, this.state);
    this.at(length - 1);
    this.say("Nothing is known yet.");
  }

  at(index) {
    while (this.spans.length <= Math.min(index, 5000)) {
      const one = el("span", { class: "t empty", text: "·" });
      this.spans.push(one);
      this.line.append(one);
    }
    return this.spans[index];
  }

  say(text) {
    this.state.textContent = text;
  }

  settled(count, changed) {
    for (const [index, text] of changed) {
      const one = this.at(index);
      if (one) one.textContent = text;
    }
    this.count = count;
    this.spans.forEach((one, index) => {
      if (one.textContent !== "·" || index < count) one.className = index < count ? "t read" : "t proposed";
    });
    this.say(`${count} of ${this.length} tokens settled; grey ones are proposals.`);
  }

  finish(tokens, verified) {
    tokens.forEach((token, index) => {
      const one = this.at(index);
      if (!one) return;
      one.textContent = token.text;
      if (verified) one.className = "t settled";
      else one.className = `t c${level(token.confidence ?? 0)}`;
      if (token.right === false) one.className = "t wrong";
    });
  }
}
