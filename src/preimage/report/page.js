"use strict";
// Draws the figures in the theme of the reader; for print in the light one, as wide as the paper, details open.
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const night = matchMedia("(prefers-color-scheme: dark)");
  const plots = [...document.querySelectorAll(".plot")];
  const config = { displayModeBar: false, responsive: true, scrollZoom: false };
  const paperWidth = 660; // pixels between the margins of A4

  if (plots.length) {
    const themes = read("themes");
    const theme = () => themes[night.matches ? "dark" : "light"];
    for (const plot of plots) {
      const figure = read(plot.id + "-data");
      plot.textContent = "";
      plot.base = figure.layout.height;
      Plotly.newPlot(plot, figure.data, { ...figure.layout, template: theme() }, config).then(() => fit(plot));
    }
    // A legend takes no room from what it explains: the figure grows by its rows, fewer on a wider screen.
    const fit = (plot) => {
      const legend = plot.querySelector(".legend .bg");
      const rows = legend ? legend.getBoundingClientRect().height : 0;
      const height = plot.base + Math.max(0, Math.ceil(rows) - 30);
      if (height === plot.clientHeight) return;
      plot.style.height = height + "px";
      Plotly.relayout(plot, { height });
    };
    const change = (update) =>
      plots.forEach((plot) => Plotly.relayout(plot, update).then(() => fit(plot)));
    let width = innerWidth, waiting = 0;
    addEventListener("resize", () => {
      if (innerWidth === width) return;
      width = innerWidth;
      clearTimeout(waiting);
      waiting = setTimeout(() => plots.forEach(fit), 300); // after the figures have followed
    });
    night.addEventListener("change", () => change({ template: theme() }));
    addEventListener("beforeprint", () => change({ template: themes.light, width: paperWidth }));
    addEventListener("afterprint", () => change({ template: theme(), width: null, autosize: true }));
  }

  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    closed.forEach((one) => (one.open = true));
  });
  addEventListener("afterprint", () => closed.forEach((one) => (one.open = false)));

  // A tip that would leave the screen is moved back into it.
  addEventListener("pointerover", (event) => place(event.target));
  addEventListener("focusin", (event) => place(event.target));
  function place(token) {
    const tip = token.classList && token.classList.contains("t") ? token.querySelector(".tip") : null;
    if (!tip) return;
    tip.style.marginLeft = "0";
    const over = tip.getBoundingClientRect().right - document.documentElement.clientWidth + 8;
    if (over > 0) tip.style.marginLeft = -over + "px";
  }
})();
