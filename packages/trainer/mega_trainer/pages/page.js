"use strict";
// Tooltip with the values of a figure's lines at the pointer.
const tip = document.body.appendChild(document.createElement("div"));
tip.id = "tip";
tip.hidden = true;
for (const chart of document.querySelectorAll("svg[data-axes]")) {
  const [x0, x1, xAt, xLong, y0, y1, yAt, yLong, log] = chart.dataset.axes.split(" ").map(Number);
  const lines = [...chart.querySelectorAll("path[data-name]")].map((path) => [
    path.dataset.name, path.getAttribute("d").slice(1).split("L").map((point) => point.split(",").map(Number)),
  ]);
  const yOf = (position) => {
    const part = (position - yAt) / yLong;
    return log ? y0 * (y1 / y0) ** part : y0 + part * (y1 - y0);
  };
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect(), at = (event.clientX - box.left) * chart.viewBox.baseVal.width / box.width;
    const near = new Map();
    for (const [name, points] of lines)
      for (const [x, y] of points)
        if (!near.has(name) || Math.abs(x - at) < Math.abs(near.get(name)[0] - at)) near.set(name, [x, y]);
    if (!near.size) return;
    const [first] = near.values();
    const step = Math.round(x0 + (first[0] - xAt) / xLong * (x1 - x0));
    tip.textContent = [`step ${step.toLocaleString("en")}`, ...[...near].map(([name, [, y]]) => `${name} ${+yOf(y).toPrecision(4)}`)].join("\n");
    tip.hidden = false;
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${event.clientY + 14}px`;
  });
  chart.addEventListener("pointerleave", () => { tip.hidden = true; });
}
