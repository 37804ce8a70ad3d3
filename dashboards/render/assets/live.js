// Asks for the changing parts of the page again and again, and replaces those that differ.
(() => {
  "use strict";
  const main = document.getElementById("main");
  const news = document.getElementById("news");
  const figures = document.getElementById("figures");
  const last = new Map(); // what each part and figure was last
  let tag = main.dataset.tag;
  let every = Number(main.dataset.every);
  let failures = 0;

  const sameAs = (old) => (each) =>
    each.tagName === old.tagName && each.getAttribute("href") === old.getAttribute("href")
    && each.getAttribute("aria-label") === old.getAttribute("aria-label");
  const replaced = (section, html) => {
    const focused = section.contains(document.activeElement) ? document.activeElement : null;
    const scrolled = [...section.querySelectorAll(".table")].map((each) => [each.scrollLeft, each.scrollTop]);
    section.innerHTML = html; // every text in it was escaped where it was made; the page's policy runs no script of it
    section.querySelectorAll(".table").forEach((each, number) => {
      if (scrolled[number]) [each.scrollLeft, each.scrollTop] = scrolled[number];
    });
    if (focused) [...section.querySelectorAll("a, [tabindex]")].find(sameAs(focused))?.focus({ preventScroll: true });
  };
  const said = () => document.querySelector(".bar span")?.textContent.match(/^\d+ of \d+ trials/)?.[0] ?? "";

  const tell = (text, look) => {
    news.className = look;
    news.textContent = text;
  };

  const element = (name, attributes) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };
  const framed = ({ name, specification, description }) => {
    const figure = element("figure", { class: "drawing", "data-name": name, "data-description": description });
    const canvas = element("div", { class: "canvas", role: "region", tabindex: "0", "aria-label": `Figure: ${name}` });
    const data = element("script", { type: "application/json" });
    data.textContent = JSON.stringify(specification);
    canvas.append(document.createElement("div"));
    figure.append(canvas, data);
    return figure;
  };
  const drawn = (wanted) => {
    for (const figure of figures.querySelectorAll("figure"))
      if (!wanted.some(({ name }) => name === figure.dataset.name)) {
        figure.previousElementSibling?.remove();
        figure.remove();
      }
    for (const each of wanted) {
      const text = JSON.stringify(each);
      if (last.get(`figure ${each.name}`) === text) continue;
      last.set(`figure ${each.name}`, text);
      let figure = [...figures.querySelectorAll("figure")].find(({ dataset }) => dataset.name === each.name);
      if (!figure) {
        const heading = element("h2", {});
        heading.textContent = each.name;
        figure = framed(each);
        figures.append(heading, figure);
      }
      figure.dataset.description = each.description;
      figure.querySelector("script").textContent = JSON.stringify(each.specification);
      dashboard.draw(figure);
    }
  };
  const show = ({ parts, figures: wanted, every_seconds: seconds }) => {
    const before = said();
    for (const section of main.querySelectorAll("section[data-part]")) {
      const html = parts[section.dataset.part] ?? "";
      if (last.get(section.dataset.part) === html) continue;
      last.set(section.dataset.part, html);
      replaced(section, html);
    }
    drawn(wanted);
    every = seconds;
    if (said() !== before) tell(said(), "unseen"); // it stands beside the bar already
  };
  const ask = async () => {
    const answer = await fetch(main.dataset.at, { headers: { "If-None-Match": `"${tag}"` }, cache: "no-store" });
    if (answer.status === 304) return;
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    show(await answer.json());
    tag = (answer.headers.get("ETag") ?? "").replaceAll('"', "");
  };
  const next = async () => {
    try {
      if (!document.hidden) await ask();
      if (failures) tell("", "unseen");
      failures = 0;
    } catch (error) {
      failures += 1;
      tell(`No answer from this page's server (${error.message}); trying again.`, "warning");
    }
    setTimeout(next, 1000 * Math.min(60, every * 2 ** Math.min(failures, 5)));
  };
  setTimeout(next, 1000 * every);
})();
