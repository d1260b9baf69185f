"use strict";
// The timeline of a pipeline on a canvas: zoomed by wheel, pinch, buttons and keys, told by tips.
const COLOURS_OF_KINDS = {
  forward: "c0", backward: "c1", weight: "c4", recompute: "c6", receive: "c5", reduce: "c7", update: "c3",
};
const TIMELINE_AXIS = 24;
const TIMELINE_LABELS = 34;

// The columns that `timeline_columns` packed, as typed arrays; starts and ends in seconds.
const unpackTimeline = async (packed) => {
  const bytes = Uint8Array.from(atob(packed.columns), (character) => character.charCodeAt(0));
  const inflated = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const view = new DataView(await new Response(inflated).arrayBuffer());
  const count = packed.counts.reduce((sum, events) => sum + events, 0);
  const tick = packed.seconds / packed.ticks;
  const read = (offset, index) => view.getUint16(offset + 2 * index, true);
  const devices = [];
  let index = 0;
  for (const events of packed.counts) {
    const device = [];
    let at = 0;
    for (let end = index + events; index < end; index += 1) {
      const start = at + view.getUint32(5 * count + 4 * index, true);
      at = start + view.getUint32(9 * count + 4 * index, true);
      device.push({
        kind: packed.kinds[view.getUint8(index)],
        stage: read(count, index),
        batch: read(3 * count, index),
        start: start * tick,
        end: at * tick,
      });
    }
    devices.push(device);
  }
  return devices;
};

const eventText = (event) => {
  const about = event.batch === 65535 ? event.kind : `${event.kind}, microbatch ${event.batch}, stage ${event.stage}`;
  return `${about}\n${page.seconds(event.end - event.start)} at ${page.seconds(event.start)}`;
};

const drawTimeline = (canvas, devices, scale, rowHeight) => {
  const ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = TIMELINE_AXIS + devices.length * rowHeight;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  const fills = Object.fromEntries(Object.entries(COLOURS_OF_KINDS).map(([kind, name]) => [kind, page.colour(name)]));
  const inks = Object.fromEntries(Object.entries(fills).map(([kind, fill]) => [kind, page.inkOn(fill)]));
  const [first, last] = scale.domain();
  let shown = 0;
  context.save();
  context.beginPath();
  context.rect(TIMELINE_LABELS, 0, width - TIMELINE_LABELS, height);
  context.clip();
  devices.forEach((events, device) => {
    const top = TIMELINE_AXIS + device * rowHeight;
    context.fillStyle = page.colour("line");
    context.fillRect(TIMELINE_LABELS, top, width, rowHeight - 1);
    for (let index = d3.bisector((event) => event.end).right(events, first); index < events.length; index += 1) {
      const event = events[index];
      if (event.start > last) break;
      shown += 1;
      const left = scale(event.start);
      const wide = scale(event.end) - left;
      context.globalAlpha = event.stage === 65535 ? 1 : 1 - 0.22 * (Math.floor(event.stage / devices.length) % 3);
      context.fillStyle = fills[event.kind];
      context.fillRect(left, top, wide > 3 ? wide - 0.5 : wide, rowHeight - 1);
      if (wide > 20 && rowHeight > 11 && event.batch !== 65535) {
        context.globalAlpha = 1;
        context.fillStyle = inks[event.kind];
        context.fillText(String(event.batch), Math.max(left, TIMELINE_LABELS) + 4, top + rowHeight / 2);
      }
    }
    context.globalAlpha = 1;
  });
  context.restore();
  context.fillStyle = page.colour("soft");
  const every = Math.ceil(12 / rowHeight);
  devices.forEach((_, device) => {
    if (device % every === 0) context.fillText(String(device), 2, TIMELINE_AXIS + (device + 0.5) * rowHeight);
  });
  const ticks = scale.ticks(Math.max(2, Math.floor(width / 110)));
  const digits = Math.max(0, Math.ceil(-Math.log10((ticks[1] ?? last) - (ticks[0] ?? first)) + 1e-9));
  for (const tick of ticks) {
    context.fillRect(scale(tick), TIMELINE_AXIS - 5, 1, 5);
    context.fillText(`${tick.toFixed(digits)} s`, Math.min(scale(tick) + 3, width - 40), 9);
  }
  Object.assign(canvas.dataset, { shown, first, last });
};

const makeTimeline = (place, devices, total) => {
  const canvas = document.createElement("canvas");
  const rowHeight = Math.max(5, Math.min(26, Math.floor(560 / devices.length)));
  const events = d3.sum(devices, (device) => device.length);
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${events} events on ${devices.length} places of the pipeline in ${page.seconds(total)}`);
  canvas.dataset.events = events;
  let transform = d3.zoomIdentity;
  const scale = () => transform.rescaleX(d3.scaleLinear([0, total], [TIMELINE_LABELS, canvas.clientWidth || 600]));
  const draw = () => drawTimeline(canvas, devices, scale(), rowHeight);
  const zoom = d3.zoom()
    .scaleExtent([1, 5000])
    .filter((event) => event.type !== "wheel" || event.ctrlKey || event.metaKey || document.activeElement === canvas)
    .on("zoom", (event) => { transform = event.transform; page.hideTip(); draw(); });
  const limits = () => {
    const extent = [[TIMELINE_LABELS, 0], [canvas.clientWidth || 600, 1]];
    zoom.extent(extent).translateExtent(extent);
  };
  const selection = d3.select(canvas).call(zoom);
  const pan = (share) => selection.call(zoom.translateBy, (share * canvas.clientWidth) / transform.k, 0);
  const actions = {
    "+": () => selection.call(zoom.scaleBy, 2),
    "=": () => selection.call(zoom.scaleBy, 2),
    "-": () => selection.call(zoom.scaleBy, 0.5),
    0: () => selection.call(zoom.transform, d3.zoomIdentity),
    ArrowLeft: () => pan(0.2),
    ArrowRight: () => pan(-0.2),
  };
  canvas.addEventListener("keydown", (event) => {
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  });
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const device = devices[Math.floor((event.clientY - box.top - TIMELINE_AXIS) / rowHeight)] || [];
    const time = scale().invert(event.clientX - box.left);
    const found = device[d3.bisector((one) => one.end).right(device, time)];
    if (found && found.start <= time) page.showTip(eventText(found), event.clientX, event.clientY);
    else page.hideTip();
  });
  canvas.addEventListener("pointerleave", page.hideTip);
  const tools = document.createElement("div");
  tools.className = "tools";
  const used = new Set(devices.flat().map((event) => event.kind));
  const entries = Object.entries(COLOURS_OF_KINDS).filter(([kind]) => used.has(kind));
  const relegend = () => page.legend([...entries.map(([kind, name]) => [kind, page.colour(name)]), ["idle", page.colour("line")]]);
  for (const [label, key, name] of [["+", "+", "Zoom in"], ["−", "-", "Zoom out"], ["All", "0", "Show the whole step"]]) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = label;
    button.setAttribute("aria-label", name);
    button.addEventListener("click", actions[key]);
    tools.append(button);
  }
  tools.prepend(relegend());
  place.replaceChildren(tools, canvas);
  return () => { limits(); tools.firstChild.replaceWith(relegend()); draw(); };
};

const showTimeline = async (name, packed) => {
  if (!packed || !document.getElementById(`${name}-chart`)) return;
  const devices = await unpackTimeline(packed);
  let redraw = null;
  page.chart(name, (width, place) => {
    redraw = redraw || makeTimeline(place, devices, packed.seconds);
    redraw();
  });
};
