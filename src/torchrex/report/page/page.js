"use strict";
// Draws the figures that come into sight, and sorts tables by their heads.
document.documentElement.classList.add("js");
const dark = matchMedia("(prefers-color-scheme: dark)");
const read = (element) => JSON.parse(element.textContent);
const templates = read(document.getElementById("templates"));
const figures = [...document.querySelectorAll("figure[data-kind]")];
const linked = new Set(["energy", "noise"]); // over the same steps

function layoutOf(figure, layout) {
  const margin = { t: 8, r: figure.clientWidth < 520 ? 8 : 16, l: 40, b: 36 };
  const touch = matchMedia("(pointer: coarse)").matches; // there a drag scrolls the page
  return { ...layout, template: templates[dark.matches ? "dark" : "light"], margin, autosize: true, ...(touch ? { dragmode: false } : {}) };
}

async function draw(figure) {
  const plot = figure.querySelector(".plot");
  const spec = figure.spec || read(figure.querySelector("script"));
  const first = !figure.spec;
  figure.spec = spec;
  const name = `${figure.dataset.kind}-${figures.indexOf(figure)}`;
  const config = {
    responsive: true, displaylogo: false, displayModeBar: "hover",
    modeBarButtons: [["toImage", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
    toImageButtonOptions: { format: "svg", filename: name },
  };
  await Plotly.react(plot, spec.data, layoutOf(figure, first ? spec.layout : plot.layout), config);
  if (first && linked.has(figure.dataset.kind)) plot.on("plotly_relayout", (change) => zoomAlike(figure, change));
  figure.dataset.drawn = dark.matches ? "dark" : "light";
}

// The figures of one family over the same steps zoom together.
let zooming = false;
async function zoomAlike(figure, change) {
  if (zooming) return;
  const view = Object.fromEntries(Object.entries(change).filter(([key]) => key.startsWith("xaxis.")));
  if (!Object.keys(view).length) return;
  zooming = true;
  for (const other of figure.parentElement.children) {
    if (other !== figure && other.spec && linked.has(other.dataset.kind)) await Plotly.relayout(other.querySelector(".plot"), view);
  }
  zooming = false;
}

async function loadPlotly() {
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  // Plotly brings a style element for maps, which the policy of the page refuses.
  const head = document.head;
  head.appendChild = (node) => (node.tagName === "STYLE" && node.textContent ? node : Node.prototype.appendChild.call(head, node));
  head.append(script);
  delete head.appendChild;
}

// Plotly takes longer to load than the page: it waits for the first figure in sight.
let loading;
async function show(figure) {
  loading ??= loadPlotly();
  try {
    await loading;
  } catch (error) {
    figure.querySelector(".plot").textContent = "This browser cannot draw the figure.";
    return;
  }
  await draw(figure);
}

const onSight = new IntersectionObserver((entries) => {
  for (const { target } of entries.filter((entry) => entry.isIntersecting)) {
    onSight.unobserve(target);
    show(target);
  }
}, { rootMargin: "300px" });
const first = figures.filter((figure) => !figure.closest("details:not([open])")).slice(0, 2);
for (const figure of figures) first.includes(figure) ? show(figure) : onSight.observe(figure);
dark.addEventListener("change", () => figures.filter((figure) => figure.spec).forEach(draw));
addEventListener("beforeprint", () => { // what is closed is not on paper
  for (const figure of figures) if (!figure.closest("details:not([open])")) show(figure);
});

// Numbers by size, text by the alphabet, empty cells last either way.
function valueOf(row, column) {
  const text = row.cells[column].dataset.v;
  if (text === undefined || text === "") return null;
  const number = Number(text);
  return Number.isNaN(number) ? text : number;
}

function sortTable(table, column, descending) {
  const rows = [...table.tBodies[0].rows].map((row) => [valueOf(row, column), row]);
  rows.sort(([a], [b]) => {
    if (a === null || b === null) return (a === null) - (b === null);
    const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
    return descending ? -order : order;
  });
  table.tBodies[0].append(...rows.map(([, row]) => row));
  [...table.tHead.rows[0].cells].forEach((head, k) => head.setAttribute("aria-sort", k !== column ? "none" : descending ? "descending" : "ascending"));
}

for (const table of document.querySelectorAll("table.sortable")) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => sortTable(table, column, head.getAttribute("aria-sort") === "ascending"));
  });
}
