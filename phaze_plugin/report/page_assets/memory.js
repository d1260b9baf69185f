"use strict";
// Memory of every place in a pipeline as stacked bars, against the limit and the limit less the margin.
const MEMORY_COLOURS = {
  parameters: "c0", gradients: "c6", optimizer: "c4", activations: "c1", working: "c7", buffers: "c5", reserved: "c2",
};

const drawMemory = (data) => (width) => {
  const rows = data.memory.flatMap(({ place, items, total }) =>
    Object.entries(items).map(([item, gib]) => ({ place, item, gib, total })));
  const items = [...new Set(rows.map((row) => row.item))];
  const fills = items.map((item) => page.colour(MEMORY_COLOURS[item] || "c2"));
  const free = data.capacity * (1 - data.margin);
  const svg = Plot.plot({
    width, height: 60 + 24 * data.memory.length, marginLeft: 36, marginRight: 16, marginBottom: 34, style: page.style(),
    x: { label: "GiB", domain: [0, Math.max(data.capacity * 1.02, d3.max(rows, (row) => row.total) * 1.02)] },
    y: { label: null, domain: data.memory.map((row) => row.place), tickSize: 0, padding: 0.25 },
    color: { domain: items, range: fills },
    marks: [
      Plot.barX(rows, { x: "gib", y: "place", fill: "item", ariaLabel: (row) => `${row.item} ${row.gib}` }),
      Plot.ruleX([free], { stroke: page.colour("soft"), strokeDasharray: "3 3" }),
      Plot.ruleX([data.capacity], { stroke: page.colour("bad"), strokeWidth: 2 }),
    ],
  });
  svg.setAttribute("aria-label", `memory of ${data.memory.length} places in GiB`);
  const marks = [...svg.querySelectorAll("g[aria-label=bar] rect")].map((node, index) => ({
    node, text: `place ${rows[index].place}: ${rows[index].item} ${rows[index].gib.toFixed(2)} GiB\nin all ${rows[index].total.toFixed(1)} GiB`,
  }));
  const lines = [["limit", page.colour("bad")], ["limit less margin", page.colour("soft")]];
  return [page.legend([...items.map((item, index) => [item, fills[index]]), ...lines]), page.inspectable(svg, marks)];
};
