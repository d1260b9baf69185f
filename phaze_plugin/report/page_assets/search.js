"use strict";
// The charts of a search's page.
const drawDesigns = (data) => (width) => {
  const evaluated = data.designs.filter((design) => design.value !== null);
  const reference = data.reference.value === null ? [] : [data.reference];
  const svg = Plot.plot({
    width, height: Math.max(320, Math.min(480, width * 0.5)), marginLeft: 56, marginRight: 20, marginBottom: 40, style: page.style(),
    x: { label: "area in mm² →", grid: true, nice: true },
    y: { label: `↑ ${data.unit}`, grid: true, domain: [0, 1.07 * d3.max([data.bound, data.best.value])] },
    marks: [
      Plot.ruleY([data.bound], { stroke: page.colour("c3"), strokeWidth: 1.5 }),
      Plot.text([data.bound], { y: (value) => value, frameAnchor: "right", dy: -7, text: () => "proven bound", textAnchor: "end", fill: page.colour("c3") }),
      Plot.ruleX([data.reference.area], { stroke: page.colour("soft"), strokeDasharray: "3 3" }),
      Plot.text([data.reference], { x: "area", frameAnchor: "bottom", dx: -4, dy: -6, textAnchor: "end", text: "name", fill: page.colour("soft") }),
      Plot.link(data.boxes, { x1: "from", x2: "to", y1: "bound", y2: "bound", stroke: page.colour("c2"), strokeWidth: 4, strokeLinecap: "round", strokeOpacity: 0.7 }),
      Plot.dot(evaluated, { x: "area", y: "value", r: 4.5, fill: page.colour("c0"), stroke: (design) => page.colour(design.isFront ? "c1" : "card"), strokeWidth: (design) => (design.isFront ? 2.5 : 1) }),
      Plot.dot(reference, { x: "area", y: "value", symbol: "diamond", r: 7, fill: page.colour("soft") }),
      Plot.dot([data.best], { x: "area", y: "value", symbol: "star", r: 10, fill: page.colour("c5"), stroke: page.colour("card") }),
    ],
    color: { type: "identity" },
  });
  svg.setAttribute("aria-label", `${evaluated.length} evaluated designs and ${data.boxes.length} boxes that were ruled out`);
  const dots = [...svg.querySelectorAll("circle")].map((node) => ({ node, row: evaluated[d3.select(node).datum()] }))
    .map(({ node, row }) => ({ node, text: `${row.name}\n${row.area.toFixed(1)} mm²: ${page.number(row.value)} ${data.unit}` }));
  const lines = [...svg.querySelectorAll("g[aria-label=link] path")].map((node) => ({ node, row: data.boxes[d3.select(node).datum()] }))
    .map(({ node, row }) => ({ node, text: `${row.name}\n${row.points} designs, none exceeds ${page.number(row.bound)} ${data.unit}` }));
  const entries = [["the best", page.colour("c5")], ["evaluated", page.colour("c0")], ["on the front", page.colour("c1")], ["ruled out together", page.colour("c2")]];
  return [page.legend(entries), page.inspectable(svg, [...dots, ...lines])];
};

// Parallel coordinates: every axis has its own scale, from the least to the largest size among the designs.
const drawShapes = (data) => (width) => {
  const shown = data.designs.filter((design) => design.value !== null);
  const lines = [...shown, { ...data.reference, isReference: true }, { ...data.best, isBest: true }];
  const axes = Object.keys(data.axes).filter((axis) => lines.every((line) => axis in line.fields));
  const height = 320;
  const x = d3.scalePoint(axes, [40, width - 40]);
  const y = Object.fromEntries(axes.map((axis) => {
    const sizes = lines.map((line) => line.fields[axis]);
    const [least, most] = d3.extent(sizes);
    return [axis, least > 0 && most / least > 8 ? d3.scaleLog([least, most], [height - 30, 40]) : d3.scaleLinear(least < most ? [least, most] : [least - 1, most + 1], [height - 30, 40])];
  }));
  const svg = d3.create("svg").attr("viewBox", [0, 0, width, height]).attr("width", width).attr("height", height)
    .attr("aria-label", `${lines.length} designs by their sizes`);
  const path = (line) => d3.line()(axes.map((axis) => [x(axis), y[axis](line.fields[axis])]));
  const stroke = (line) => page.colour(line.isBest ? "c5" : line.isReference ? "ink" : "c0");
  const paths = svg.append("g").attr("fill", "none").selectAll("path").data(lines).join("path").attr("d", path).attr("stroke", stroke)
    .attr("stroke-width", (line) => (line.isBest ? 3.5 : line.isReference ? 2 : 1.5)).attr("stroke-opacity", (line) => (line.isBest || line.isReference ? 1 : 0.35))
    .attr("stroke-dasharray", (line) => (line.isReference ? "5 4" : null));
  const groups = svg.append("g").selectAll("g").data(axes).join("g").attr("transform", (axis) => `translate(${x(axis)},0)`);
  groups.append("line").attr("y1", 40).attr("y2", height - 30).attr("stroke", page.colour("line"));
  const small = width < 560;
  const text = (selection) => selection.attr("fill", page.colour("soft")).attr("font-size", small ? 9 : 11).attr("text-anchor", "middle");
  text(groups.append("text")).attr("y", (axis, index) => (small && index % 2 ? 26 : 14)).text((axis) => data.axes[axis]);
  groups.each(function ticks(axis) {
    const sizes = [...new Set(lines.map((line) => line.fields[axis]))].sort((a, b) => a - b);
    const some = sizes.length > 6 ? [sizes[0], sizes[Math.floor(sizes.length / 2)], sizes.at(-1)] : sizes;
    text(d3.select(this).selectAll("text.size").data(some).join("text").attr("class", "size")).attr("text-anchor", "start")
      .attr("stroke", page.colour("card")).attr("stroke-width", 3).attr("paint-order", "stroke")
      .attr("x", 4).attr("y", (size) => y[axis](size) + 4).text((size) => d3.format("~g")(size));
  });
  const marks = paths.nodes().map((node, index) => {
    const line = lines[index];
    const value = line.value === null ? "" : `\n${page.number(line.value)} ${data.unit}`;
    return { node, text: `${line.name}${value}\n${axes.map((axis) => `${data.axes[axis]} ${line.fields[axis]}`).join(", ")}` };
  });
  return page.inspectable(svg.node(), marks);
};

page.chart("designs", drawDesigns(page.data));
page.chart("shapes", drawShapes(page.data));
