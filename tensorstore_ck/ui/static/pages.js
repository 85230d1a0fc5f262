// What pages do beyond htmx: buttons that copy code, and what is new while training runs. Without scripts every page still works.
"use strict";

function showCopyButtons(root) {
  for (const button of root.querySelectorAll("[data-copy]")) button.hidden = false;
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  await navigator.clipboard.writeText(button.previousElementSibling.textContent);
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 2000);
});

showCopyButtons(document);
document.addEventListener("htmx:afterSwap", (event) => showCopyButtons(event.target));

// While the page is visible, pieces that `data-live` names are shown as they are now, and charts read their data again (tsck:look).
const LOOK_MILLISECONDS = 5000;

function replaceLive(piece, fresh) {
  if (!fresh || fresh.outerHTML === piece.lookedAt || piece.contains(document.activeElement)) return;
  const chosen = [...piece.querySelectorAll("input:checked")].map((input) => [input.name, input.value]);
  fresh.lookedAt = fresh.outerHTML;
  piece.replaceWith(fresh);
  for (const [name, value] of chosen) {
    const input = [...fresh.querySelectorAll("input")].find((one) => one.name === name && one.value === value);
    if (input) input.checked = true;
  }
  htmx.process(fresh);
  showCopyButtons(fresh);
}

async function look() {
  if (document.hidden || !document.querySelector("[data-live]")) return;
  const answer = await fetch(location.href).catch(() => null);  // the next look tries again
  if (!answer?.ok) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const piece of document.querySelectorAll("[data-live]")) replaceLive(piece, page.getElementById(piece.id));
  document.dispatchEvent(new Event("tsck:look"));
}

setInterval(look, LOOK_MILLISECONDS);
document.addEventListener("visibilitychange", look);
