"use strict";
// Charts in SVG: hover reads values, a drag zooms in, a double click or 0 zooms out, and charts over the same x zoom together.
const SVG = "http://www.w3.org/2000/svg";
const STYLES = 8;
const HEIGHT = 230;

function el(tag, attributes, ...children) {
  const made = tag === "svg" || el.svg.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children); // strings become text nodes: nothing from a run folder is ever parsed as HTML
  return made;
}
el.svg = new Set(["path", "line", "text", "rect", "g", "circle", "clipPath", "defs"]);

function format(value) {
  if (value === null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e7 || size < 1e-3)) return value.toExponential(2).replace("e+", "e");
  return Number(value.toPrecision(5)).toLocaleString("en", { maximumFractionDigits: 8 });
}

function tickText(value) {
  if (Math.abs(value) < 1e5) return format(value);
  const [digits, power] = Number(value.toPrecision(4)).toExponential().split("e+");
  return `${digits}e${power}`;
}

function ticks(low, high, count, log) {
  if (log) {
    const [a, b] = [Math.floor(Math.log10(low) + 1e-9), Math.ceil(Math.log10(high) - 1e-9)];
    const steps = b - a > 4 ? [1] : b - a > 1 ? [1, 3] : [1, 2, 5];
    const every = Math.max(1, Math.ceil((b - a) / count));
    const found = [];
    for (let power = a; power <= b; power += every) for (const step of steps) found.push(step * 10 ** power);
    const inside = found.filter((t) => t >= low * 0.999 && t <= high * 1.001);
    if (inside.length > 1) return inside;
  }
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((s) => s * power >= raw * 0.999);
  const found = [];
  for (let t = Math.ceil(low / step - 1e-9) * step; t <= high + step * 1e-9; t += step) found.push(Math.abs(t) < step * 1e-9 ? 0 : t);
  return found;
}

function nearest(xs, x) {
  let [low, high] = [0, xs.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  return Math.abs(xs[high] - x) < Math.abs(xs[low] - x) ? high : low;
}

class Link {
  // Charts that share an x axis.
  constructor() { this.charts = []; }
  zoom(view) { for (const chart of this.charts) chart.show(view); }
}

class Chart {
  constructor(spec, shared, link) {
    this.spec = spec;
    this.link = link;
    this.hidden = new Set();
    this.lines = spec.series.map((line) => ({ ...line, x: typeof line.x === "string" ? shared[line.x] : line.x }));
    const xs = this.lines.flatMap((line) => (line.x.length ? [line.x[0], line.x[line.x.length - 1]] : []));
    this.full = xs.length ? [Math.min(...xs), Math.max(...xs)] : [0, 1];
    if (this.full[0] === this.full[1]) this.full = [this.full[0] - 0.5, this.full[1] + 0.5];
    this.view = this.full;
    this.id = "clip" + Chart.count++;
    this.figure = this.build();
    link.charts.push(this);
  }

  build() {
    const { spec } = this;
    this.svg = el("svg", { tabindex: 0, role: "img", "aria-label": `${spec.title}; ${spec.yLabel} against ${spec.xLabel}` });
    this.readout = el("output", {});
    this.reset = el("button", { type: "button", onclick: () => this.link.zoom(null), disabled: "" }, "all");
    const bar = el("div", { class: "bar" },
      el("button", { type: "button", "aria-label": "zoom in", onclick: () => this.scale(0.5) }, "+"),
      el("button", { type: "button", "aria-label": "zoom out", onclick: () => this.scale(2) }, "−"), this.reset);
    if (spec.marks && spec.marks.x.length) {
      bar.append(el("button", { type: "button", onclick: () => this.toSwap(-1) }, "◂ swap"), el("button", { type: "button", class: "next", onclick: () => this.toSwap(1) }, "swap ▸"), el("span", { class: "note" }, spec.marks.name));
    }
    const figure = el("figure", { class: "chart", "data-kind": spec.kind }, el("figcaption", {}, spec.title), this.svg, this.legend(), bar, this.readout);
    if (spec.note) figure.append(el("p", { class: "note" }, spec.note));
    this.listen();
    return figure;
  }

  legend() {
    const list = el("ul", { class: "legend" });
    this.lines.forEach((line, k) => {
      if (line.type === "band" || line.faint) return;
      const style = line.style % STYLES;
      const sample = el("svg", { viewBox: "0 0 24 10", "aria-hidden": "true" });
      if (line.type === "dots") sample.append(el("circle", { class: `d p${style}`, cx: 12, cy: 5, r: 2.5 }));
      else if (line.type === "area") sample.append(el("rect", { class: `f area p${style}`, width: 24, height: 10 }));
      else sample.append(el("path", { class: `s k${style}`, d: "M0 5H24" }));
      const toggle = el("button", { type: "button", "aria-pressed": "true" }, sample, line.name);
      toggle.addEventListener("click", () => {
        // A faint line and a band belong to the line of the same style that the legend names.
        const mine = this.lines.flatMap((other, j) => (j === k || ((other.faint || other.type === "band") && other.style === line.style) ? [j] : []));
        const hide = !this.hidden.has(k);
        for (const j of mine) hide ? this.hidden.add(j) : this.hidden.delete(j);
        toggle.setAttribute("aria-pressed", String(!hide));
        this.draw();
      });
      list.append(el("li", {}, toggle));
    });
    return list;
  }

  listen() {
    let start = null;
    const at = (event) => this.invert(event.clientX - this.svg.getBoundingClientRect().left);
    this.svg.addEventListener("pointerdown", (event) => { start = event.clientX; this.svg.setPointerCapture(event.pointerId); });
    this.svg.addEventListener("pointermove", (event) => {
      if (start !== null && Math.abs(event.clientX - start) > 4) this.brush(start, event.clientX);
      this.hover(at(event));
    });
    this.svg.addEventListener("pointerup", (event) => {
      const left = this.svg.getBoundingClientRect().left;
      if (start !== null && Math.abs(event.clientX - start) > 8) {
        const ends = [this.invert(start - left), this.invert(event.clientX - left)].sort((a, b) => a - b);
        this.link.zoom(ends);
      }
      start = null;
      this.brush(null);
    });
    this.svg.addEventListener("pointercancel", () => { start = null; this.brush(null); });
    this.svg.addEventListener("pointerleave", () => this.hover(null));
    this.svg.addEventListener("dblclick", () => this.link.zoom(null));
    this.svg.addEventListener("keydown", (event) => {
      const keys = { "+": () => this.scale(0.5), "-": () => this.scale(2), 0: () => this.link.zoom(null), ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2) };
      if (keys[event.key] && !event.ctrlKey && !event.metaKey && !event.altKey) { event.preventDefault(); keys[event.key](); }
    });
  }

  show(view) {
    if (view) {
      const least = (this.full[1] - this.full[0]) * 1e-6;
      const clipped = [Math.max(view[0], this.full[0]), Math.min(view[1], this.full[1])];
      if (clipped[1] - clipped[0] < least) return;
      this.view = clipped;
    } else this.view = this.full;
    this.draw();
  }

  forward(x) { return this.spec.xLog ? Math.log(x) : x; }

  scale(by, centre) {
    const [a, b] = this.view.map((x) => this.forward(x));
    const middle = centre === undefined ? (a + b) / 2 : this.forward(centre);
    const back = (x) => (this.spec.xLog ? Math.exp(x) : x);
    const next = [back(middle - ((b - a) / 2) * by), back(middle + ((b - a) / 2) * by)];
    this.link.zoom(by > 1 && next[0] <= this.full[0] && next[1] >= this.full[1] ? null : next);
  }

  pan(by) {
    const shift = (this.view[1] - this.view[0]) * by;
    const kept = Math.max(this.full[0] - this.view[0], Math.min(this.full[1] - this.view[1], shift));
    this.link.zoom([this.view[0] + kept, this.view[1] + kept]);
  }

  toSwap(direction) {
    // To the next swap beyond the middle of what is seen; the first time to the first one.
    const marks = this.spec.marks.x;
    const whole = this.view === this.full;
    const middle = whole ? (direction > 0 ? -Infinity : Infinity) : (this.view[0] + this.view[1]) / 2;
    const span = this.full[1] - this.full[0];
    const width = whole ? Math.min(span, Math.max(span / 50, (30 * span) / Math.max(1, this.lines[0].x.length))) : this.view[1] - this.view[0];
    const beyond = direction > 0 ? marks.find((x) => x > middle + width * 0.01) : marks.filter((x) => x < middle - width * 0.01).pop();
    if (beyond !== undefined) this.link.zoom([beyond - width / 2, beyond + width / 2]);
  }

  place() {
    this.width = Math.max(200, this.svg.clientWidth);
    this.box = { left: 66, right: this.width - 14, top: 8, bottom: HEIGHT - 36 };
    const [x0, x1] = this.view.map((x) => this.forward(x));
    this.px = (x) => this.box.left + ((this.forward(x) - x0) / (x1 - x0)) * (this.box.right - this.box.left);
  }

  invert(px) {
    const [x0, x1] = this.view.map((x) => this.forward(x));
    const x = x0 + ((Math.min(Math.max(px, this.box.left), this.box.right) - this.box.left) / (this.box.right - this.box.left)) * (x1 - x0);
    return this.spec.xLog ? Math.exp(x) : x;
  }

  visible(line) {
    // Indices inside the view and one beyond on either side, so that lines leave through the edge.
    const xs = line.x;
    let first = 0, last = xs.length - 1;
    while (first < last && xs[first + 1] < this.view[0]) first++;
    while (last > first && xs[last - 1] > this.view[1]) last--;
    return [first, last];
  }

  range() {
    if (this.spec.yRange) return this.spec.yRange;
    let low = Infinity, high = -Infinity;
    this.lines.forEach((line, k) => {
      if (this.hidden.has(k)) return;
      const [first, last] = this.visible(line);
      for (const values of line.type === "band" ? [line.low, line.high] : [line.y]) {
        for (let i = first; i <= last; i++) {
          const v = values[i];
          if (v === null || v === undefined || (this.spec.yLog && v <= 0)) continue;
          if (v < low) low = v;
          if (v > high) high = v;
        }
      }
    });
    // Of the whole, the first few draws of an average are left to the edge; who zooms in sees them.
    if (this.spec.yLow !== undefined && this.view === this.full && this.spec.yLow < high) low = Math.max(low, this.spec.yLow);
    if (low > high) [low, high] = this.spec.yLog ? [0.1, 1] : [0, 1];
    if (this.spec.whole) return [low - 0.3, high + 0.3];
    if (this.spec.yLog) return low === high ? [low / 2, high * 2] : [low / 1.1, high * 1.1];
    if (this.spec.zero) low = Math.min(0, low);
    const room = (high - low) * 0.05 || Math.abs(high) * 0.1 || 0.5;
    return [this.spec.zero ? low : low - room, high + room];
  }

  draw() {
    if (!this.svg.isConnected || !this.svg.clientWidth) return;
    this.place();
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.svg.setAttribute("height", HEIGHT);
    const { box, spec } = this;
    const range = this.range();
    const bend = (y) => (spec.yLog ? Math.log(y) : y);
    const [y0, y1] = range.map(bend);
    this.py = (y) => box.bottom - ((bend(y) - y0) / (y1 - y0)) * (box.bottom - box.top);
    const parts = [el("defs", {}, el("clipPath", { id: this.id }, el("rect", { x: box.left, y: box.top - 1, width: box.right - box.left, height: box.bottom - box.top + 2 })))];
    const whole = (from, to) => Array.from({ length: Math.max(0, Math.floor(to) - Math.ceil(from) + 1) }, (_, k) => Math.ceil(from) + k);
    for (const t of spec.whole ? whole(...range) : ticks(...range, 5, spec.yLog)) {
      parts.push(el("path", { class: "grid", d: `M${box.left} ${this.py(t).toFixed(1)}H${box.right}` }), el("text", { x: box.left - 6, y: this.py(t) + 4, "text-anchor": "end" }, tickText(t)));
    }
    for (const t of ticks(...this.view, Math.max(2, Math.floor(this.width / 90)), spec.xLog)) {
      const x = this.px(t);
      parts.push(el("path", { class: "axis", d: `M${x.toFixed(1)} ${box.bottom}v4` }), el("text", { x: Math.min(x, this.width - 1), y: box.bottom + 16, "text-anchor": x > this.width - 40 ? "end" : "middle" }, format(t)));
    }
    parts.push(el("path", { class: "axis", d: `M${box.left} ${box.bottom}H${box.right}` }));
    parts.push(el("text", { x: (box.left + box.right) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, spec.xLabel));
    const middle = (box.top + box.bottom) / 2;
    parts.push(el("text", { x: 11, y: middle, "text-anchor": "middle", transform: `rotate(-90 11 ${middle})` }, spec.yLabel));
    const inner = el("g", { "clip-path": `url(#${this.id})` });
    this.lines.forEach((line, k) => { if (!this.hidden.has(k)) inner.append(...this.shapes(line)); });
    if (spec.marks) {
      const seen = spec.marks.x.filter((x) => x >= this.view[0] && x <= this.view[1]);
      const d = seen.map((x) => `M${this.px(x).toFixed(1)} ${box.bottom}v${seen.length > 60 ? -7 : -14}`).join("");
      inner.append(el("path", { class: "mark", d }));
    }
    this.cross = el("path", { class: "cross", d: "" });
    this.rect = el("rect", { class: "brush", y: box.top, height: box.bottom - box.top, width: 0 });
    this.svg.replaceChildren(...parts, inner, this.cross, this.rect);
    this.reset.disabled = this.view === this.full;
    this.svg.dataset.view = this.view.join(" ");
  }

  shapes(line) {
    const style = line.style % STYLES;
    const [first, last] = this.visible(line);
    const point = (i, values) => {
      const v = values[i];
      return v === null || v === undefined || (this.spec.yLog && v <= 0) ? null : [this.px(line.x[i]).toFixed(1), this.py(v).toFixed(1)];
    };
    if (line.type === "band") {
      const there = [];
      for (let i = first; i <= last; i++) { const [a, b] = [point(i, line.low), point(i, line.high)]; if (a && b) there.push([a, b]); }
      if (!there.length) return [];
      const d = "M" + there.map(([a]) => a.join(" ")).join("L") + "L" + there.reverse().map(([, b]) => b.join(" ")).join("L") + "Z";
      return [el("path", { class: `f p${style}`, d })];
    }
    let d = "", dots = "", before = null;
    for (let i = first; i <= last; i++) {
      const now = point(i, line.y);
      if (now) {
        if (line.type === "step" && before) d += `H${now[0]}V${now[1]}`;
        else d += `${before ? "L" : "M"}${now[0]} ${now[1]}`;
        if (line.type === "dots" || line.type === "dotted") dots += `M${now[0]} ${now[1]}m-1.6 0a1.6 1.6 0 1 0 3.2 0a1.6 1.6 0 1 0 -3.2 0`;
      }
      before = now;
    }
    if (line.type === "dots") return [el("path", { class: `d p${style}`, d: dots })];
    if (line.type === "area") {
      const floor = this.box.bottom;
      return [el("path", { class: `f area p${style}`, d: `${d}L${this.px(line.x[last]).toFixed(1)} ${floor}L${this.px(line.x[first]).toFixed(1)} ${floor}Z` })];
    }
    const made = [el("path", { class: `s k${style}${line.faint ? " faint" : ""}`, d })];
    if (dots) made.push(el("path", { class: `d p${style}`, d: dots }));
    return made;
  }

  brush(from, to) {
    if (!this.rect) return;
    if (from === null) return this.rect.setAttribute("width", 0);
    const left = this.svg.getBoundingClientRect().left;
    const ends = [from - left, to - left].map((x) => Math.min(Math.max(x, this.box.left), this.box.right)).sort((a, b) => a - b);
    this.rect.setAttribute("x", ends[0]);
    this.rect.setAttribute("width", ends[1] - ends[0]);
  }

  hover(x) {
    if (!this.cross) return;
    if (x === null) { this.cross.setAttribute("d", ""); this.readout.textContent = ""; return; }
    const guide = this.lines.find((line, k) => !this.hidden.has(k) && line.type !== "area" && line.x.length) || this.lines[0];
    if (!guide || !guide.x.length) return;
    const at = guide.x[nearest(guide.x, x)];
    this.cross.setAttribute("d", `M${this.px(at).toFixed(1)} ${this.box.top}V${this.box.bottom}`);
    const values = [];
    this.lines.forEach((line, k) => {
      if (this.hidden.has(k) || line.type === "band" || !line.x.length) return;
      values.push(`${line.name}: ${format(line.y[nearest(line.x, at)])}`);
    });
    this.readout.textContent = `${this.spec.xLabel} ${format(at)} · ${values.join(" · ")}`;
  }
}
Chart.count = 0;

const onSight = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) entry.target.chart.draw();
}, { rootMargin: "300px" });
const onResize = new ResizeObserver((entries) => {
  for (const entry of entries) {
    const { chart } = entry.target;
    if (chart.width && Math.abs(entry.contentRect.width - chart.width) > 1) chart.draw();
  }
});

// Charts are drawn when they come into sight; on paper all of them are.
addEventListener("beforeprint", () => { for (const svg of document.querySelectorAll(".chart > svg")) svg.chart.draw(); });

function drawCharts(host, data) {
  const links = new Map();
  for (const spec of data.charts) {
    const key = spec.over || spec; // the others zoom alone
    if (!links.has(key)) links.set(key, new Link());
    const chart = new Chart(spec, data.shared, links.get(key));
    host.append(chart.figure);
    chart.svg.chart = chart;
    onSight.observe(chart.svg);
    onResize.observe(chart.svg);
  }
}
