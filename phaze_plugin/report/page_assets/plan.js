"use strict";
// The charts of a plan's page.
const BINDING_COLOURS = { compute: "c0", memory: "c1", link: "c5", fill: "c6", overhead: "c7" };

// Devices as squares: a row (wrapped where it is long) for each place of the pipeline, copies beside each other.
const deviceSquares = (data, width) => {
  const longest = d3.max(data.places, (row) => row.count);
  const groups = d3.max(data.places, (row) => row.count / row.tp);
  const cell = Math.max(7, Math.min(20, Math.floor((width - 44 - 3 * groups) / longest)));
  const tall = Math.max(12, cell);
  const gap = 3;
  const squares = [];
  let top = 0;
  data.places.forEach((row, place) => {
    const group = row.tp * cell + gap;
    const perLine = Math.max(1, Math.floor((width - 44) / group)) * row.tp;
    for (let index = 0; index < row.count; index += 1) {
      const line = Math.floor(index / perLine);
      const column = index % perLine;
      squares.push({
        rank: row.first + index, place, copy: Math.floor(index / row.tp), neighbour: index % row.tp,
        x: 40 + column * cell + Math.floor(column / row.tp) * gap, y: top + line * (tall + 1), wide: cell - 1, tall: tall - 1,
      });
    }
    top += Math.ceil(row.count / perLine) * (tall + 1) + 4;
  });
  return { squares, height: top };
};

const squareText = (square, data) => {
  const nodes = data.levels.length > 1 ? `, node ${Math.floor(square.rank / data.levels[0])}` : "";
  return `rank ${square.rank}${nodes}\nplace ${square.place}, copy ${square.copy}, tensor-parallel neighbour ${square.neighbour}`;
};

const drawMesh = (data) => (width) => {
  const { squares, height } = deviceSquares(data, width);
  const node = data.levels.length > 1 ? data.levels[0] : data.devices;
  const rest = (square) => page.colour(Math.floor(square.rank / node) % 2 ? "c2" : "line");
  const svg = d3.create("svg").attr("viewBox", [0, 0, width, height]).attr("width", width).attr("height", height)
    .attr("aria-label", `${squares.length} devices`);
  svg.selectAll("text").data(data.places).join("text").attr("x", 0).attr("font-size", 11).attr("fill", page.colour("soft"))
    .attr("y", (_, place) => squares.find((square) => square.place === place).y + 10).text((_, place) => `${place}`);
  const rects = svg.selectAll("rect").data(squares).join("rect").attr("x", (d) => d.x).attr("y", (d) => d.y)
    .attr("width", (d) => d.wide).attr("height", (d) => d.tall).attr("rx", 1.5).attr("fill", rest);
  const colours = { tensor: page.colour("c1"), data: page.colour("c0"), pipeline: page.colour("c4") };
  const relation = (one, other) => {
    if (one.place === other.place && one.copy === other.copy) return colours.tensor;
    if (one.place === other.place && one.neighbour === other.neighbour) return colours.data;
    return one.copy === other.copy && one.neighbour === other.neighbour ? colours.pipeline : null;
  };
  const show = (mark) => rects.attr("fill", (square) => (mark && relation(mark.square, square)) || rest(square));
  const marks = rects.nodes().map((rect, index) => ({
    node: rect, square: squares[index], text: squareText(squares[index], data),
  }));
  const entries = [["tensor-parallel neighbours", colours.tensor], ["data-parallel copies", colours.data], ["pipeline", colours.pipeline]];
  const hint = document.createElement("p");
  hint.className = "note";
  hint.textContent = data.levels.length > 1 ? "Shades alternate from node to node. Point at a device to see who it talks to." : "Point at a device to see who it talks to.";
  const drawn = page.inspectable(svg.node(), marks, show);
  show(marks[0]);
  return [page.legend(entries), drawn, hint];
};

const layerTree = (data) => ({
  name: "all",
  children: data.layers.map((layer) => {
    return {
      name: layer.count > 1 ? `${layer.name} and ${layer.count - 1} like it` : layer.name,
      children: layer.ops.map(([name, phase, seconds, binding]) => ({
        name, phase, binding, each: seconds, value: seconds * layer.count, layer,
      })),
    };
  }).filter((layer) => layer.children.length),
});

const drawLayers = (data) => (width) => {
  const height = Math.max(280, Math.min(460, width * 0.5));
  const root = d3.hierarchy(layerTree(data)).sum((node) => node.value || 0).sort((a, b) => b.value - a.value);
  d3.treemap().size([width, height]).paddingInner(1).paddingOuter(1).paddingTop((node) => (node.depth === 1 ? 18 : 1))(root);
  const svg = d3.create("svg").attr("viewBox", [0, 0, width, height]).attr("width", width).attr("height", height)
    .attr("aria-label", "operators by time");
  const clipped = (text, space) => (text.length * 6.3 < space ? text : space < 40 ? "" : `${text.slice(0, Math.floor(space / 6.3) - 1)}…`);
  const label = (selection) => selection.attr("font-size", 11).attr("pointer-events", "none");
  label(svg.append("g").selectAll("text").data(root.children || []).join("text")).attr("x", (d) => d.x0 + 4)
    .attr("y", (d) => d.y0 + 13).attr("fill", page.colour("ink"))
    .text((d) => clipped(`${d.data.name}: ${((100 * d.value) / root.value).toFixed(1)} %`, d.x1 - d.x0 - 6));
  const leaves = root.leaves().filter((leaf) => leaf.depth === 2);
  const cells = svg.append("g").selectAll("rect").data(leaves).join("rect").attr("x", (d) => d.x0).attr("y", (d) => d.y0)
    .attr("width", (d) => d.x1 - d.x0).attr("height", (d) => d.y1 - d.y0)
    .attr("fill", (d) => page.colour(BINDING_COLOURS[d.data.binding] || "c2"))
    .attr("fill-opacity", (d) => ({ forward: 1, backward: 0.8, recompute: 0.6 })[d.data.phase]);
  label(svg.append("g").selectAll("text").data(leaves.filter((d) => d.y1 - d.y0 > 14 && d.x1 - d.x0 > 40)).join("text"))
    .attr("x", (d) => d.x0 + 4).attr("y", (d) => d.y0 + 12)
    .attr("fill", (d) => page.inkOn(page.colour(BINDING_COLOURS[d.data.binding] || "c2"))).text((d) => clipped(d.data.name, d.x1 - d.x0 - 6));
  const marks = cells.nodes().map((node, index) => {
    const { name, phase, binding, each, value, layer } = leaves[index].data;
    const times = layer.count > 1 ? `, ${layer.count} times` : "";
    return { node, text: `${name}\n${phase}, ${binding} decides\n${page.seconds(each)}${times}: ${((100 * value) / root.value).toFixed(2)} % of all layers` };
  });
  const used = new Set(leaves.map((leaf) => leaf.data.binding));
  const entries = Object.entries(BINDING_COLOURS).filter(([name]) => used.has(name)).map(([name, fill]) => [name, page.colour(fill)]);
  return [page.legend(entries), page.inspectable(svg.node(), marks)];
};

const drawLandscape = (data) => (width) => {
  const { strategies, plan, bound } = data.landscape;
  const times = [bound, plan.seconds, ...strategies.map((row) => row.seconds)];
  const fills = { simulated: page.colour("c0"), pruned: page.colour("c2"), open: page.colour("c1") };
  const svg = Plot.plot({
    width, height: Math.max(300, Math.min(440, width * 0.45)), marginLeft: 44, marginRight: 20, marginBottom: 40, style: page.style(),
    x: { type: "log", domain: [0.93 * d3.min(times), 1.05 * d3.max(times)], label: "step time in seconds, or the bound under it →", grid: true, tickFormat: "~g" },
    y: { label: "↑ GiB on the fullest device, or the bound under it", grid: true, domain: [0, 1.05 * Math.max(data.capacity, d3.max(strategies, (row) => row.gib))] },
    marks: [
      Plot.ruleY([data.capacity], { stroke: page.colour("bad"), strokeWidth: 1.5 }),
      Plot.ruleX([bound], { stroke: page.colour("c3"), strokeWidth: 1.5 }),
      Plot.dot(strategies, {
        x: "seconds", y: "gib", r: (row) => (row.state === "simulated" ? 5 : 3), stroke: (row) => fills[row.state], fill: (row) => (row.state === "simulated" ? fills.simulated : "transparent"),
        strokeOpacity: 0.85, ariaLabel: "text",
      }),
      Plot.dot([plan], { x: "seconds", y: "gib", symbol: "star", r: 9, fill: page.colour("c5"), stroke: page.colour("card") }),
      Plot.text([{ x: bound, text: "proven bound" }], { x: "x", frameAnchor: "top", dy: 12, text: "text", textAnchor: "start", dx: 5, fill: page.colour("c3") }),
      Plot.text([data.capacity], { y: (value) => value, frameAnchor: "right", dy: -7, text: () => "memory of a device", textAnchor: "end", fill: page.colour("bad") }),
    ],
    r: { type: "identity" }, color: { type: "identity" },
  });
  svg.setAttribute("aria-label", `${strategies.length} strategies`);
  const nodes = [...svg.querySelectorAll("circle")];
  const points = nodes.map((node) => ({ node, row: strategies[d3.select(node).datum()] }));
  const marks = points.sort((a, b) => a.row.seconds - b.row.seconds).map(({ node, row }) => ({
    node,
    text: row.state === "simulated"
      ? `${row.text}\nsimulated: ${page.seconds(row.seconds)}, ${row.gib.toFixed(1)} GiB`
      : `${row.text}\n${row.state}: at least ${page.seconds(row.seconds)} and ${row.gib.toFixed(1)} GiB`,
  }));
  const entries = Object.entries({ simulated: "simulated", pruned: "ruled out by its bound", open: "left open" })
    .filter(([state]) => strategies.some((row) => row.state === state)).map(([state, name]) => [name, fills[state]]);
  return [page.legend([["the plan", page.colour("c5")], ...entries]), page.inspectable(svg, marks)];
};

showTimeline("timeline", page.data.timeline);
page.chart("memory", drawMemory(page.data));
page.chart("mesh", drawMesh(page.data));
page.chart("layers", drawLayers(page.data));
page.chart("landscape", drawLandscape(page.data));
