"use strict";
// Values under the pointer, sortable tables, and copying. Names and values
// come from files of runs: they are only ever set as text, never as markup.

const element = (tag, name, text) => {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
};

const shown = (value) => {
  if (value === null || value === undefined) return "not finite";
  const size = Math.abs(value);
  if (size >= 1e15) return Number(value.toPrecision(4)).toExponential();
  if (Number.isInteger(value) || size >= 999.95) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(4)));
};

const within = (value, low, high) => Math.min(Math.max(value, low), high);

// --- values under the pointer ---

const nearest = (sorted, wanted) => {
  let best = 0;
  sorted.forEach((x, i) => { if (Math.abs(x - wanted) < Math.abs(sorted[best] - wanted)) best = i; });
  return best;
};

// The nearest point of a panel in which each point is a client.
const pointAt = (chart, x, y) => {
  const [left, right] = chart.xlim, [bottom, top] = chart.ylim;
  let best = null;
  for (const line of chart.lines) {
    line.x.forEach((px, i) => {
      const at = (px - left) / (right - left);
      const distance = Math.hypot(at - x, 1 - (line.y[i] - bottom) / (top - bottom) - y);
      if (!best || distance < best.distance) best = { distance, at, line, i, px };
    });
  }
  const { line, i, px, at } = best;
  const row = { label: line.n, color: line.c, text: shown(line.y[i]), y: line.y[i] };
  return { title: line.names[i], at, rows: [row, { label: chart.xlabel, text: shown(px) }] };
};

const rowsAt = (chart, x, y) => {
  if (chart.layers) {
    const row = within(Math.floor(y * chart.rows.length), 0, chart.rows.length - 1);
    const column = within(Math.floor(x * chart.columns.length), 0, chart.columns.length - 1);
    const rows = chart.layers.map((layer) => {
      const value = layer.v[row][column];
      return { label: layer.n, text: layer.names ? layer.names[value] : shown(value) };
    });
    return { title: `${chart.columns[column]}, ${chart.rows[row]}`, at: (column + 0.5) / chart.columns.length, rows };
  }
  const [low, high] = chart.xlim;
  if (chart.lines.some((line) => line.names)) return pointAt(chart, x, y);
  const wanted = low + x * (high - low);
  const xs = chart.lines.map((line) => line.x);
  const places = xs.map((each) => nearest(each, wanted));
  const distance = (i) => Math.abs(xs[i][places[i]] - wanted);
  const first = chart.lines.reduce((best, _, i) => (distance(i) < distance(best) ? i : best), 0);
  const found = xs[first][places[first]];
  const rows = chart.lines.flatMap((line, i) => {
    const place = places[i];
    // A line that has no point here is left out, not shown with the value of another round.
    if (chart.xlabel === "round" && xs[i][place] !== found) return [];
    let band = line.b && line.b[place] ? ` ± ${shown(line.b[place])}` : "";
    if (line.s) band = ` (${line.s.map((seed) => shown(seed[place])).join(", ")})`;
    return [{ label: line.n, color: line.c, text: shown(line.y[place]) + band, y: line.y[place] }];
  });
  return { title: `${chart.xlabel} ${shown(found)}`, at: (found - low) / (high - low), rows };
};

const watch = (box) => {
  const chart = JSON.parse(box.dataset.chart);
  const guide = element("div", "guide"), tip = element("div", "tip");
  const marks = element("div");
  const [left, top, right, bottom] = chart.box;
  const hide = () => { for (const part of [guide, tip, marks]) part.hidden = true; };
  const show = (event) => {
    const place = box.getBoundingClientRect();
    const x = ((event.clientX - place.left) / place.width - left) / (right - left);
    const y = ((event.clientY - place.top) / place.height - top) / (bottom - top);
    if (x < -0.04 || x > 1.04 || y < -0.1 || y > 1.1) return hide();
    const found = rowsAt(chart, within(x, 0, 1), within(y, 0, 1));
    const at = left + within(found.at, 0, 1) * (right - left);
    guide.style.left = `${at * 100}%`;
    guide.style.top = `${top * 100}%`;
    guide.style.height = `${(bottom - top) * 100}%`;
    tip.replaceChildren(element("b", "", found.title));
    marks.replaceChildren();
    const scale = chart.log ? Math.log10 : Number;
    const [low, high] = chart.ylim.map(scale);
    for (const row of found.rows) {
      const line = element("div");
      if (row.color !== undefined) line.append(element("i", `dot c${row.color}`));
      line.append(element("span", "", `${row.label} `), element("strong", "", row.text));
      tip.append(line);
      const height = row.y === undefined || row.y === null ? NaN : (scale(row.y) - low) / (high - low);
      if (height >= 0 && height <= 1) {
        const dot = element("i", `dot mark c${row.color}`);
        dot.style.left = `${at * 100}%`;
        dot.style.top = `${(bottom - height * (bottom - top)) * 100}%`;
        marks.append(dot);
      }
    }
    for (const part of [guide, tip, marks]) part.hidden = false;
    // Beside the guide line, where there is more room.
    const free = place.width - tip.offsetWidth;
    const beside = at < 0.5 ? at * place.width + 12 : at * place.width - tip.offsetWidth - 12;
    tip.style.left = `${within(beside, 0, Math.max(0, free))}px`;
    tip.style.top = `${top * 100}%`;
  };
  hide();
  box.append(guide, marks, tip);
  box.addEventListener("pointermove", show);
  box.addEventListener("pointerdown", show);
  box.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
  document.addEventListener("pointerdown", (event) => { if (!box.contains(event.target)) hide(); });
};

// --- sortable tables ---

const key = (text) => {
  const value = parseFloat(text.replaceAll(",", ""));
  return Number.isNaN(value) ? null : value;
};

const sortable = (table) => {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => {
    const button = element("button", "", head.textContent);
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const falls = head.getAttribute("aria-sort") === "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", falls ? "descending" : "ascending");
      const rows = [...body.rows].map((row) => [key(row.cells[column].textContent), row.cells[column].textContent, row]);
      rows.sort(([a, s], [b, t]) => {
        if (a === null && b === null) return s.localeCompare(t, "en", { numeric: true }) * (falls ? -1 : 1);
        if (a === null || b === null) return a === null ? 1 : -1; // missing values last
        return (a - b) * (falls ? -1 : 1);
      });
      body.append(...rows.map(([, , row]) => row));
    });
  });
};

// --- copying ---

const copyable = (box) => {
  const button = element("button", "copy", "Copy"), text = box.querySelector("pre");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text.textContent);
      button.textContent = "Copied";
    } catch { // not allowed for files in some browsers: select the text instead
      getSelection().selectAllChildren(text);
      button.textContent = "Selected";
    }
  });
  box.prepend(button);
};

document.querySelectorAll("[data-chart]").forEach(watch);
document.querySelectorAll("table.sortable").forEach(sortable);
document.querySelectorAll(".copyable").forEach(copyable);
