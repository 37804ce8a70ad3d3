// Draws every figure of the page in the colours of its theme; on narrow screens panels stand in one column.
// A <figure class="drawing"> holds a <div class="canvas"> and the specification as JSON.
(() => {
  "use strict";
  const narrow = matchMedia("(max-width: 820px)");
  const text = (id) => document.getElementById(id).textContent;
  const dark = JSON.parse(text("dark-colours"));

  const unpacked = async () => {
    const bytes = Uint8Array.from(atob(text("library")), (each) => each.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  };
  let library;

  const mapped = (value, change) => {
    if (Array.isArray(value)) return value.map((each) => mapped(each, change));
    if (value === null || typeof value !== "object") return change(value);
    return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, mapped(each, change)]));
  };
  // Panels beside each other share the names of categories; one below the other each has its own.
  const named = (value) => {
    if (Array.isArray(value)) return value.map(named);
    if (value === null || typeof value !== "object") return value;
    const entries = Object.entries(value).filter(([name, each]) => name !== "labels" || each !== false);
    return Object.fromEntries(entries.map(([name, each]) => [name, named(each)]));
  };
  const stacked = (given) => {
    const { hconcat, ...rest } = named(given);
    const whole = hconcat ? { ...rest, vconcat: hconcat } : rest;
    const column = (each) => (each.concat ? { ...each, columns: 1 } : each);
    return whole.vconcat ? { ...whole, vconcat: whole.vconcat.map(column) } : column(whole);
  };

  const draw = async (figure) => {
    await (library ??= unpacked());
    const canvas = figure.querySelector(".canvas > div");
    const given = JSON.parse(figure.querySelector("script").textContent);
    const isDark = dashboard.isDark();
    const placed = narrow.matches ? stacked(given) : given;
    const coloured = isDark ? mapped(placed, (each) => dark[each] ?? each) : placed;
    const { view } = await vegaEmbed(canvas, coloured, {
      renderer: "svg",
      ast: true, // expressions are interpreted, so that the page's policy need not allow evaluation
      actions: { export: true, source: false, compiled: false, editor: false },
      downloadFileName: figure.dataset.name,
      tooltip: { theme: isDark ? "dark" : "light" },
    });
    for (const part of canvas.querySelectorAll("[role], [aria-label], [aria-roledescription]"))
      for (const name of ["role", "aria-label", "aria-roledescription"]) part.removeAttribute(name);
    const svg = canvas.querySelector("svg.marks");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", figure.dataset.description);
    canvas.querySelector("summary")?.setAttribute("aria-label", "Save the figure");
    figure.dataset.drawn = isDark ? "dark" : "light";
    return view;
  };

  const waiting = new WeakMap(); // one at a time for each figure: an older drawing must not come last
  const drawInTurn = (figure) => {
    const next = (waiting.get(figure) ?? Promise.resolve()).then(() => draw(figure)).catch((error) => {
      const canvas = figure.querySelector(".canvas > div");
      canvas.textContent = `The figure cannot be drawn (${error.message}); the numbers are in the tables.`;
    });
    waiting.set(figure, next);
    return next;
  };
  const drawAll = () => document.querySelectorAll(".drawing").forEach(drawInTurn);
  addEventListener("theme", drawAll);
  narrow.addEventListener("change", drawAll);
})();
