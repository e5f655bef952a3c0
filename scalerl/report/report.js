"use strict";
// Values under the pointer. Without this script the page says the same, only without pointing.
(() => {
  const tip = document.getElementById("tip");
  const show = (text, x, y) => {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.width - 6)) + "px";
    tip.style.top = (y + box.height + 24 > innerHeight ? y - box.height - 10 : y + 16) + "px";
  };
  const hide = () => { tip.hidden = true; };
  const make = (svg, name, kind) => {
    const mark = document.createElementNS("http://www.w3.org/2000/svg", name);
    mark.setAttribute("class", kind);
    svg.appendChild(mark);
    return mark;
  };
  for (const svg of document.querySelectorAll("svg[data-hover]")) {
    const points = JSON.parse(svg.dataset.hover);
    const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
    let ring = null;
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = (event.clientX - box.left) * width / box.width, y = (event.clientY - box.top) * height / box.height;
      let best = null, least = Infinity;
      for (const point of points) {
        const distance = (point[0] - x) ** 2 + 0.05 * (point[1] - y) ** 2;
        if (distance < least) { least = distance; best = point; }
      }
      ring = ring || make(svg, "circle", "cursor-dot");
      ring.setAttribute("cx", best[0]); ring.setAttribute("cy", best[1]); ring.setAttribute("r", 6);
      show(best[2], event.clientX, event.clientY);
    });
    svg.addEventListener("pointerleave", () => { hide(); if (ring) { ring.remove(); ring = null; } });
  }
  addEventListener("pointerover", (event) => {
    const target = event.target.closest ? event.target.closest("[data-tip]") : null;
    if (target) show(target.dataset.tip, event.clientX, event.clientY);
    else if (!(event.target.closest && event.target.closest("svg[data-hover]"))) hide();
  });
  addEventListener("scroll", hide, { passive: true });
  // What is folded away on the screen is printed too.
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open])")];
    for (const part of folded) part.open = true;
  });
  addEventListener("afterprint", () => { for (const part of folded) part.open = false; });
})();
