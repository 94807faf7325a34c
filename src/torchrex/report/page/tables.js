// Tables that sort by a click on a head: numbers by size, text by the alphabet, empty cells last either way.
function valueOf(row, column) {
  const cell = row.cells[column];
  const box = cell.querySelector("input[type=checkbox]");
  const text = box ? (box.checked ? "0" : "1") : cell.dataset.v;
  if (text === undefined || text === "") return null;
  const number = Number(text);
  return Number.isNaN(number) ? text : number;
}

function sortTable(table, column, descending) {
  const body = table.tBodies[0];
  const rows = [...body.rows].map((row) => [valueOf(row, column), row]);
  rows.sort(([a], [b]) => {
    if (a === null || b === null) return (a === null) - (b === null);
    const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
    return descending ? -order : order;
  });
  body.append(...rows.map(([, row]) => row));
  [...table.tHead.rows[0].cells].forEach((head, k) => head.setAttribute("aria-sort", k !== column ? "none" : descending ? "descending" : "ascending"));
}

for (const table of document.querySelectorAll("table.sortable")) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => sortTable(table, column, head.getAttribute("aria-sort") === "ascending"));
  });
}
