// On a phone a table with three columns or more becomes a list of entries. Each cell then shows the head of its column.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll(".bd-article table")) {
    const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim());
    if (heads.length < 3) continue;
    table.classList.add("stacks");
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.cells].forEach((cell, column) => {
        cell.dataset.head = heads[column] ?? "";
        cell.classList.toggle("short", cell.textContent.trim().length < 24);
        cell.classList.toggle("number", !isNaN(cell.textContent.trim() || NaN));
      });
    }
  }
  for (const image of document.querySelectorAll(".bd-article p > img")) {
    image.parentElement.tabIndex = matchMedia("(max-width: 640px)").matches ? 0 : -1; // the keys scroll it
  }
});
