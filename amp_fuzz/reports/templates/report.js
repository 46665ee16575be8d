"use strict";
// Filters, sorts and opens the table of ops; copies commands. Without it the pages still say all but
// the mixes of dtypes.
const $ = (selector, root = document) => root.querySelector(selector);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];

for (const button of all(".commands button")) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    const pre = $("pre", button.parentElement);
    try {
      await navigator.clipboard.writeText(pre.textContent.trim() + "\n");
      button.textContent = "copied";
    } catch {  // a page opened from a file may not use the clipboard: select the text instead
      getSelection().selectAllChildren(pre);
      button.textContent = "selected";
    }
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });
}

// A link into the folded part opens it.
const more = $("#more");
function unfold() {
  const place = document.getElementById(location.hash.slice(1));
  if (place && more.contains(place)) {
    more.open = true;
    place.scrollIntoView();
  }
}
if (more) {
  addEventListener("hashchange", unfold);
  unfold();
}

const ops = $("#op-table");
if (ops) {
  const detail = JSON.parse($("#detail").textContent);
  const body = ops.tBodies[0];
  const rows = all("tr.op", body);
  const columns = all("thead th.heat", ops).length;
  const most = all("td.heat", body).reduce((n, cell) => Math.max(n, value(cell)), 1);
  const search = $("#search"), policy = $("#policy"), outcome = $("#outcome"), mixes = $("#mixes");
  $("#tools").hidden = false;

  function value(cell) { return Number(cell.dataset.n ?? 0); }

  // The same logarithmic scale as the page was made with.
  function level(cases) {
    return Math.min(6, 1 + Math.floor(6 * Math.log1p(cases) / Math.log1p(most)));
  }

  function element(tag, className, text) {
    const made = document.createElement(tag);
    made.className = className;
    made.textContent = text;
    return made;
  }

  function heat([, cases, own, known, fresh, said]) {
    const cell = element("td", `heat h${level(cases)}`, cases.toLocaleString("en"));
    cell.title = `cases ${cases}: ${said || "all agreed"}`;
    if (own) cell.append(element("span", "pill o", `${own} own`));
    if (known) cell.append(element("span", "pill k", `${known} known`));
    if (fresh) cell.append(element("span", "pill x", `${fresh} NEW`));
    return cell;
  }

  function matches(mix, words) {
    return words.every(word => mix[0].includes(word));
  }

  function wanted() {
    return search.value.toLowerCase().split(/\s+/).filter(Boolean);
  }

  function close(row) {
    while (row.nextElementSibling?.classList.contains("mix")) row.nextElementSibling.remove();
    $(".more", row).setAttribute("aria-expanded", "false");
  }

  function open(row) {
    close(row);
    const named = wanted().filter(word => !row.dataset.text.includes(word));
    const made = detail[row.dataset.row].filter(mix => matches(mix, named)).map(mix => {
      const line = element("tr", "mix", "");
      const head = element("th", "mono", mix[0] || "no dtypes recorded");
      head.colSpan = 3;
      line.append(head);
      const cells = new Map(mix.slice(1).map(cell => [cell[0], cell]));
      for (let i = 0; i < columns; i++) {
        line.append(cells.has(i) ? heat(cells.get(i)) : element("td", "heat h0", "\u00b7"));
      }
      return line;
    });
    row.after(...made);
    $(".more", row).setAttribute("aria-expanded", "true");
  }

  function shows(row) {
    if (policy.value && row.dataset.policy !== policy.value) return false;
    if (outcome.value && !Number(row.dataset[outcome.value])) return false;
    const named = wanted().filter(word => !row.dataset.text.includes(word));
    return !named.length || detail[row.dataset.row].some(mix => matches(mix, named));
  }

  function refresh() {
    let count = 0;
    for (const row of rows) {
      row.hidden = !shows(row);
      count += !row.hidden;
      const isOpen = $(".more", row).getAttribute("aria-expanded") === "true";
      if (row.hidden || (isOpen && !mixes.checked)) close(row);
      else if (mixes.checked) open(row);
    }
    $("#shown").textContent = `${count} of ${rows.length} rows`;
  }

  for (const row of rows) {
    $(".more", row).addEventListener("click", () => {
      $(".more", row).getAttribute("aria-expanded") === "true" ? close(row) : open(row);
    });
  }
  for (const control of [search, policy, outcome, mixes]) control.addEventListener("input", refresh);

  all("thead button", ops).forEach(button => button.addEventListener("click", () => {
    const head = button.closest("th");
    const numeric = head.classList.contains("num") || head.classList.contains("heat");
    const first = numeric ? "descending" : "ascending";
    const turn = { ascending: "descending", descending: "ascending" };
    const order = turn[head.getAttribute("aria-sort")] ?? first;
    all("thead th", ops).forEach(th => th.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", order);
    const sign = order === "ascending" ? 1 : -1;
    const key = row => row.cells[head.cellIndex];
    rows.forEach(close);
    rows.sort((a, b) => sign * (numeric
      ? value(key(a)) - value(key(b))
      : key(a).textContent.trim().localeCompare(key(b).textContent.trim(), "en")));
    body.append(...rows);
    refresh();
  }));
  refresh();
}
