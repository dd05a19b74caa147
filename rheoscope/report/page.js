"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = new Map(Object.entries(data.dark));
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const coarse = matchMedia("(pointer: coarse)");
  const toggle = document.getElementById("theme");
  // Values of the run are never colours, even if they look like one.
  const values = new Set(["x", "y", "z", "r", "theta", "text", "ticktext", "customdata", "name", "hovertemplate"]);

  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);

  // A copy of a part of a figure, each light colour replaced by its dark twin if the page is dark.
  const dressed = (part, key) => {
    if (values.has(key)) return structuredClone(part);
    if (typeof part === "string") return isDark() && dark.has(part) ? dark.get(part) : part;
    if (part === null || typeof part !== "object") return part;
    if (Array.isArray(part)) return part.map((item) => dressed(item));
    return Object.fromEntries(Object.entries(part).map(([name, item]) => [name, dressed(item, name)]));
  };

  // Beside a colour bar plotly lifts the title of the horizontal axis onto its numbers: it goes back to its place.
  const settle = (chart) => {
    for (const title of chart.querySelectorAll(".xtitle, .x2title")) {
      if (/translate\(0, ?-/.test(title.getAttribute("transform") ?? "")) title.removeAttribute("transform");
    }
  };

  const draw = (panel) => {
    const figure = data.figures[panel.id][Number(panel.dataset.view || 0)];
    const layout = dressed({ ...figure.layout, template: data.template });
    layout.dragmode = coarse.matches ? false : "zoom";
    const chart = panel.querySelector(".chart");
    chart.style.minHeight = `${layout.height}px`;
    const first = !panel.dataset.drawn;
    panel.dataset.drawn = "yes";
    const drawn = Plotly.react(chart, dressed(figure.data), layout, {
      responsive: true,
      displaylogo: false,
      // Left on, plotly offers a button that uploads the figure's data to its maker.
      showSendToCloud: false,
      plotlyServerURL: "",
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
      toImageButtonOptions: { filename: panel.id, scale: 2 },
    });
    if (first) chart.on("plotly_afterplot", () => settle(chart));
    return drawn.then(() => settle(chart));
  };

  const show = (panel, view) => {
    panel.dataset.view = view;
    panel.querySelector("figcaption").textContent = panel.querySelectorAll("template")[view].content.textContent;
    panel.querySelectorAll(".views button").forEach((button, place) => button.setAttribute("aria-pressed", place === view));
    return draw(panel);
  };

  const panels = [...document.querySelectorAll("[data-panel]")];
  for (const panel of panels) {
    panel.querySelectorAll(".views button").forEach((button, place) => button.addEventListener("click", () => show(panel, place)));
    const slider = panel.querySelector(".slider input");
    const labels = slider && data.labels[panel.id];
    slider?.addEventListener("input", () => {
      panel.querySelector("output").textContent = labels[slider.value];
      slider.setAttribute("aria-valuetext", labels[slider.value]);
      show(panel, Number(slider.value));
    });
  }

  // Figures are drawn when they come near the screen, all of them before printing.
  const near = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      near.unobserve(entry.target);
      draw(entry.target);
    }
  }, { rootMargin: "600px" });
  panels.forEach((panel) => near.observe(panel));
  addEventListener("beforeprint", () => panels.forEach(draw));

  // The entry of the contents that belongs to what is on screen.
  const links = new Map([...document.querySelectorAll(".contents a")].map((link) => [link.hash.slice(1), link]));
  const place = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      links.forEach((link) => link.removeAttribute("aria-current"));
      links.get(target.id)?.setAttribute("aria-current", "true");
    }
  }, { rootMargin: "-15% 0px -70% 0px" });
  panels.forEach((panel) => place.observe(panel));
  const contents = document.querySelector(".contents details");
  if (!matchMedia("(min-width: 76rem)").matches) contents.open = false;

  const relight = () => {
    toggle.textContent = isDark() ? "Light" : "Dark";
    toggle.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colours`);
    panels.filter((panel) => panel.dataset.drawn).forEach(draw);
  };
  toggle.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    relight();
  });
  system.addEventListener("change", relight);
  relight();
})();
