"use strict";
// Opens the card that a link leads to, with all that it is folded in.
const reveal = name => {
  const place = document.getElementById(name);
  for (let box = place; box; box = box.parentElement) if (box.tagName === "DETAILS") box.open = true;
  if (place && name) place.scrollIntoView();
};
addEventListener("hashchange", () => reveal(location.hash.slice(1)));
document.addEventListener("click", event => {
  const link = event.target.closest('a[href^="#"]');
  if (link) setTimeout(() => reveal(link.hash.slice(1)));
});
if (location.hash) reveal(location.hash.slice(1));

for (const table of document.querySelectorAll("table.summary")) {
  const rows = [...table.tBodies[0].rows];
  const box = table.closest(".rows").previousElementSibling; // the filter, which is hidden where no script runs
  const field = box.querySelector("input");
  const count = box.querySelector("output");
  const texts = rows.map(row => `${row.dataset.words} ${row.textContent}`.toLowerCase());
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/);
    rows.forEach((row, place) => { row.hidden = !words.every(word => texts[place].includes(word)); });
    count.textContent = `${rows.filter(row => !row.hidden).length} of ${rows.length}`;
  });
  box.hidden = false;
  const value = (row, column) => {
    const cell = row.cells[column];
    const number = parseFloat(cell.dataset.sort ?? cell.textContent.replace(/,/g, ""));
    return Number.isNaN(number) || cell.dataset.text !== undefined ? cell.textContent : number;
  };
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = head.querySelector("button");
    if (!button) return;
    button.disabled = false;
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const order = (a, b) => (a > b) - (a < b);
      const sorted = [...rows].sort((a, b) => order(value(a, column), value(b, column)) * (down ? -1 : 1));
      table.tBodies[0].append(...sorted);
    });
  });
}
