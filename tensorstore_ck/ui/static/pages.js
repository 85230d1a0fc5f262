// What pages do beyond htmx: buttons that copy code. Without scripts every page still works.
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
