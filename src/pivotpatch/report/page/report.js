"use strict";
for (const table of document.querySelectorAll("table.sorts")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, place) => {
    head.querySelector("button").addEventListener("click", () => {
      // Numbers begin with the highest, names with the first; a second press turns the order round.
      const first = place ? "descending" : "ascending";
      const other = place ? "ascending" : "descending";
      const order = head.getAttribute("aria-sort") === first ? other : first;
      heads.forEach((cell) => cell.setAttribute("aria-sort", cell === head ? order : "none"));
      const sign = order === "ascending" ? 1 : -1;
      const read = (row) => (place ? parseFloat(row.cells[place].textContent) : row.cells[0].textContent);
      const rows = [...body.rows].map((row) => [read(row), row]);
      rows.sort(([a], [b]) => {
        if (!place) return sign * a.localeCompare(b);
        if (isNaN(a) || isNaN(b)) return isNaN(a) - isNaN(b); // what is not known stays last
        return sign * (a - b);
      });
      body.append(...rows.map(([, row]) => row));
    });
  });
}
