// Tables that a reader sorts by a click or Enter on a heading, and filters by words.
(() => {
  "use strict";
  const order = new Intl.Collator(undefined, { numeric: true });
  const value = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
  };
  // Numbers first, then texts such as "none" and "–", in either direction.
  const compared = (one, other, sign) => {
    const numbers = [typeof one === "number", typeof other === "number"];
    if (numbers[0] !== numbers[1]) return numbers[0] ? -1 : 1;
    return sign * (numbers[0] ? one - other || 0 : order.compare(one, other));
  };

  const sort = (table, heading) => {
    const falling = heading.getAttribute("aria-sort") === "ascending";
    for (const each of table.tHead.rows[0].cells) each.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", falling ? "descending" : "ascending");
    const column = heading.cellIndex;
    const rows = [...table.tBodies[0].rows].map((row) => [value(row, column), row]);
    rows.sort(([one], [other]) => compared(one, other, falling ? -1 : 1));
    table.tBodies[0].append(...rows.map(([, row]) => row));
  };

  const filter = (table, words, count) => {
    const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = [...table.tBodies[0].rows];
    for (const row of rows) {
      const text = [...row.cells].map((cell) => cell.textContent).join(" ").toLowerCase();
      row.hidden = !wanted.every((word) => text.includes(word));
    }
    count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} shown`;
  };

  for (const box of document.querySelectorAll(".sortable")) {
    const table = box.querySelector("table");
    for (const heading of table.tHead.rows[0].cells)
      heading.querySelector("button").addEventListener("click", () => sort(table, heading));
    const input = box.querySelector("input");
    input.addEventListener("input", () => filter(table, input.value, box.querySelector("output")));
    filter(table, "", box.querySelector("output"));
  }
})();
