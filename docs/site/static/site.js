"use strict";

// Below a diagram with steps: buttons that show one step at a time, and the sentence for it. The
// sentences are the ordered list that follows the diagram.
function addButtons(drawing) {
  const steps = [...drawing.querySelectorAll(".step")];
  let list = drawing.nextElementSibling;
  while (list && list.tagName !== "OL") list = list.nextElementSibling;
  const items = list ? [...list.children] : [];
  if (steps.length === 0) return;
  if (items.length !== steps.length) { // docs/make_site.py refuses such a page
    console.error(`figure ${drawing.id}: ${steps.length} steps, but ${items.length} items in the list below it`);
    return;
  }

  let shown = 0; // 0: all steps
  const said = document.createElement("p");
  said.className = "step-text";
  said.setAttribute("aria-live", "polite");

  function show(step) {
    shown = Math.min(Math.max(step, 0), steps.length);
    drawing.classList.toggle("stepping", shown > 0);
    steps.forEach((one, i) => one.classList.toggle("on", i + 1 === shown));
    said.innerHTML = shown ? `<b>${shown} of ${steps.length}.</b> ` + items[shown - 1].innerHTML : "";
    back.disabled = shown === 0;
    next.disabled = shown === steps.length;
  }

  function button(name, action) {
    const one = document.createElement("button");
    one.type = "button";
    one.textContent = name;
    one.addEventListener("click", action);
    return one;
  }

  const back = button("Back", () => show(shown - 1));
  const next = button("Next step", () => show(shown + 1));
  const all = button("All steps", () => show(0));
  const bar = document.createElement("div");
  bar.className = "step-buttons";
  bar.append(back, next, all);
  drawing.append(bar, said);
  show(0);
}

document.querySelectorAll("figure.drawing").forEach(addButtons);

// On a narrow window, furo opens the navigation and the contents by labels, which have no keyboard.
for (const label of document.querySelectorAll("label.nav-overlay-icon, label.toc-overlay-icon")) {
  label.tabIndex = 0;
  label.setAttribute("role", "button");
  label.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    label.click();
  });
}
