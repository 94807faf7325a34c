// The charts of every family at once, and the chosen runs one beside the other.
const read = (id) => JSON.parse(document.getElementById(id).textContent);

for (const host of document.querySelectorAll("[data-charts]")) drawCharts(host, read(host.dataset.charts));

const panels = document.getElementById("panels");
const boxes = [...document.querySelectorAll("#all-runs input[type=checkbox]")];
if (boxes.length > 12) document.getElementById("all-runs").parentElement.classList.add("tall");
const open = new Map();

function plainTable(spec) {
  const row = (cells, tag) => el("tr", {}, ...cells.map((cell) => el(tag, {}, cell)));
  return el("div", {}, el("h4", {}, spec.title),
    el("div", { class: "scroll" }, el("table", {}, el("thead", {}, row(spec.head, "th")), el("tbody", {}, ...spec.rows.map((cells) => row(cells, "td"))))),
    ...(spec.note ? [el("p", { class: "note" }, spec.note)] : []));
}

function copyButton(text, source) {
  const button = el("button", { type: "button" }, "copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "copied";
    } catch { // a page from disk may not be allowed to: then select it
      getSelection().selectAllChildren(source);
      button.textContent = "selected";
    }
  });
  return button;
}

function badge(status) {
  const known = ["finished", "failed", "paused", "interrupted", "unfinished", "damaged"];
  return el("span", { class: `badge ${known.includes(status) ? status : "other"}` }, status);
}

// What is grave stands open, what is fine is folded.
function doctorSays(doctor) {
  const line = ([severity, title, words]) => el("li", {}, el("span", { class: `badge ${severity}` }, severity), el("b", {}, ` ${title}. `), words);
  const grave = doctor.findings.filter(([severity]) => severity === "problem" || severity === "warning");
  const rest = doctor.findings.filter((finding) => !grave.includes(finding));
  const made = el("div", { class: "doctor" }, el("h4", {}, "What doctor says"));
  if (doctor.quick) made.append(el("p", { class: "note quick" }, "Only a quick look: a full one may find more (see the notes)."));
  made.append(grave.length ? el("ul", {}, ...grave.map(line)) : el("p", { class: "note" }, `${doctor.verdict[0].toUpperCase()}${doctor.verdict.slice(1)}.`));
  const fine = rest.filter(([severity]) => severity === "fine").length;
  const counts = [[fine, "fine"], [rest.length - fine, rest.length - fine === 1 ? "note" : "notes"]].filter(([n]) => n);
  if (rest.length) made.append(el("details", {}, el("summary", {}, counts.map(([n, word]) => `${n} ${word}`).join(", ")), el("ul", {}, ...rest.map(line))));
  return made;
}

function panelOf(k, close) {
  const run = read(`run-${k}`);
  const marks = run.damaged.length && run.status !== "damaged" ? [badge(run.status), badge("damaged")] : [badge(run.status)];
  const panel = el("article", { class: "panel", "data-panel": k },
    el("header", {}, el("h3", {}, run.name), ...marks, el("button", { type: "button", "aria-label": `hide ${run.name}`, onclick: close }, "×")));
  if (run.problems.length) panel.append(el("div", { class: "problems" }, el("ul", {}, ...run.problems.map((words) => el("li", {}, words)))));
  panel.append(doctorSays(run.doctor));
  const charts = el("div", { class: "charts" });
  panel.append(charts);
  if (!run.charts.length) charts.append(el("p", { class: "note" }, "Nothing was recorded that could be drawn."));
  for (const picture of run.pictures) {
    panel.append(el("h4", {}, picture.title));
    if (picture.src) panel.append(el("img", { class: "samples", src: picture.src, width: picture.width, alt: picture.note }));
    panel.append(el("p", { class: "note" }, picture.note));
  }
  const command = el("pre", { class: "command" }, run.command);
  panel.append(...run.tables.map(plainTable), el("h4", {}, "To repeat it"));
  if (run.command) panel.append(command, copyButton(run.command, command));
  if (run.note) panel.append(el("p", { class: "note" }, run.note));
  if (run.config) panel.append(el("details", {}, el("summary", {}, "config.json"), el("pre", {}, run.config)));
  panel.append(el("p", { class: "note" }, "Folder: ", el("a", { href: run.folder.href }, run.folder.text), ...run.about.map(([name, value]) => ` · ${name}: ${value}`)));
  return [panel, () => drawCharts(charts, run)];
}

function showRuns() {
  for (const box of boxes) {
    const k = Number(box.dataset.run);
    if (box.checked && !open.has(k)) {
      const [panel, draw] = panelOf(k, () => { box.checked = false; showRuns(); });
      open.set(k, panel);
      panels.append(panel);
      draw();
    } else if (!box.checked && open.has(k)) {
      open.get(k).remove();
      open.delete(k);
    }
  }
  panels.classList.toggle("single", open.size === 1);
  document.getElementById("shown").textContent = `${open.size} of ${boxes.length} shown below, side by side`;
  document.getElementById("none").disabled = open.size === 0;
}

for (const box of boxes) box.addEventListener("change", showRuns);
document.getElementById("none").addEventListener("click", () => { for (const box of boxes) box.checked = false; showRuns(); });
document.getElementById("filter").addEventListener("input", (event) => {
  const words = event.target.value.toLowerCase().split(/\s+/);
  const rows = [...document.getElementById("all-runs").tBodies[0].rows];
  for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
  document.getElementById("no-match").hidden = rows.some((row) => !row.hidden);
});
for (const link of document.querySelectorAll("[data-show]")) {
  link.addEventListener("click", () => {
    const box = boxes.find((each) => each.dataset.run === link.dataset.show);
    box.checked = true;
    showRuns();
    setTimeout(() => open.get(Number(link.dataset.show)).scrollIntoView(), 0);
  });
}
showRuns();
