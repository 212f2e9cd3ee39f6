// On a phone a table with three columns or more becomes a list of entries. Each cell then shows the head of its column.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll(".bd-article table")) {
    const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim());
    if (heads.length < 3) continue;
    table.classList.add("stacks");
    table.classList.toggle("dense", heads.length > 8);
    table.classList.toggle("upright", heads.length > 12);
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.cells].forEach((cell, column) => {
        cell.dataset.head = heads[column] ?? "";
        cell.classList.toggle("short", cell.textContent.trim().length < 24);
        cell.classList.toggle("number", !isNaN(cell.textContent.trim() || NaN));
      });
    }
  }
  for (const image of document.querySelectorAll('.bd-article p > img[src$="step.png"]')) {
    image.parentElement.tabIndex = matchMedia("(max-width: 640px)").matches ? 0 : -1; // the keys scroll it
  }
  // What the theme leaves out for those who listen to a page.
  document.querySelector(".bd-sidebar-primary")?.setAttribute("role", "navigation");
  document.querySelector(".bd-sidebar-primary")?.setAttribute("aria-label", "All pages");
  for (const button of document.querySelectorAll(".search-button-field")) {
    button.setAttribute("aria-label", button.textContent.replace(/\s+/g, " ").trim());
  }
});
