"use strict";
// What all pages share: their data, colours that follow the theme, tips for pointer and keyboard, filters of tables.
const page = (() => {
  const root = document.documentElement;
  const tip = document.getElementById("tip");
  const data = JSON.parse(document.getElementById("data").textContent);
  const charts = [];

  const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();

  // Black or white, whichever is read more easily on a colour.
  const inkOn = (fill) => (d3.lab(fill).l > 62 ? "#14161a" : "#ffffff");

  const seconds = (value) => {
    for (const [scale, unit] of [[1, "s"], [1e3, "ms"], [1e6, "us"]]) {
      if (value * scale >= 1) return `${Number((value * scale).toPrecision(4))} ${unit}`;
    }
    return value ? `${Number((value * 1e6).toPrecision(4))} us` : "0 s";
  };

  const number = (value) => (value < 1e4 ? String(Number(value.toPrecision(5))) : d3.format(",.0f")(value));

  const showTip = (text, x, y) => {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = Math.min(Math.max(8, x + 14), innerWidth - box.width - 8);
    const above = y + 18 + box.height > innerHeight;
    tip.style.left = `${left}px`;
    tip.style.top = `${above ? y - box.height - 12 : y + 18}px`;
  };
  const hideTip = () => { tip.hidden = true; };
  // Whatever has the focus: a tip that the pointer called up must be dismissible, too.
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });

  // A chart draws itself into its place, again whenever the width or the theme changes.
  const chart = (name, draw) => {
    const place = document.getElementById(`${name}-chart`);
    if (!place) return;
    const redraw = () => {
      if (!place.clientWidth) return; // not laid out, for example while the window is torn down
      const drawn = draw(place.clientWidth, place);
      if (drawn) place.replaceChildren(...[drawn].flat());
      place.dataset.drawn = "true";
    };
    charts.push(redraw);
    let width = place.clientWidth;
    new ResizeObserver(() => {
      if (Math.abs(place.clientWidth - width) < 2) return;
      width = place.clientWidth;
      redraw();
    }).observe(place);
    redraw();
  };

  // Every mark tells its text under the pointer; with the keyboard the arrows go from mark to mark.
  const inspectable = (svg, marks, onChange = () => {}) => {
    let chosen = -1;
    const choose = (index, x, y) => {
      if (marks[chosen]) marks[chosen].node.removeAttribute("data-chosen");
      chosen = index;
      onChange(marks[index] || null);
      if (!marks[index]) return hideTip();
      marks[index].node.setAttribute("data-chosen", "true");
      const box = marks[index].node.getBoundingClientRect();
      showTip(marks[index].text, x ?? box.left + box.width / 2, y ?? box.top + box.height / 2);
    };
    marks.forEach(({ node }, index) => {
      node.addEventListener("pointerenter", (event) => choose(index, event.clientX, event.clientY));
      node.addEventListener("pointermove", (event) => showTip(marks[index].text, event.clientX, event.clientY));
      node.addEventListener("pointerleave", () => choose(-1));
    });
    svg.setAttribute("tabindex", "0");
    svg.addEventListener("blur", () => choose(-1));
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") choose(-1);
      if (!step || !marks.length) return;
      event.preventDefault();
      choose(chosen < 0 && step < 0 ? marks.length - 1 : (chosen + step + marks.length) % marks.length);
    });
    return svg;
  };

  const legend = (entries) => {
    const list = document.createElement("ul");
    list.className = "legend";
    for (const [name, fill] of entries) {
      const item = document.createElement("li");
      const swatch = document.createElement("span");
      swatch.className = "swatch";
      swatch.style.background = fill;
      item.append(swatch, name);
      list.append(item);
    }
    return list;
  };

  const style = () => ({ background: "transparent", color: colour("ink"), fontSize: "12px" });

  const redrawAll = () => charts.forEach((redraw) => redraw());
  const button = document.getElementById("theme");
  const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme || (systemIsDark.matches ? "dark" : "light")) === "dark";
  const showTheme = () => {
    button.setAttribute("aria-pressed", String(isDark()));
    button.textContent = isDark() ? "Light" : "Dark";
  };
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    showTheme();
    redrawAll();
  });
  systemIsDark.addEventListener("change", () => { showTheme(); redrawAll(); });
  showTheme();

  for (const input of document.querySelectorAll("[data-filters]")) {
    const rows = [...document.querySelectorAll(`#${input.dataset.filters} tbody tr`)];
    const count = document.getElementById(`${input.dataset.filters}-count`);
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/);
      for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
      count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
    });
  }

  return { data, colour, inkOn, seconds, number, showTip, hideTip, chart, inspectable, legend, style };
})();
