// Table heads become buttons that sort a column by number or text; a second click reverses the order.
for (const table of document.querySelectorAll("table.data")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = row => row.cells[column].dataset.n ?? row.cells[column].textContent;
      const compare = (a, b) => {
        const x = Number(a || NaN), y = Number(b || NaN), turn = down ? -1 : 1;
        if (Number.isNaN(x) && Number.isNaN(y)) return turn * a.localeCompare(b);
        if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1;  // cells without a number come last
        return turn * (x - y);
      };
      body.append(...[...body.rows].sort((a, b) => compare(key(a), key(b))));
    });
  });
}
