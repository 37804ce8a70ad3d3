// Reloads the page regularly while it is visible and nobody is typing; the scroll position stays.
(() => {
  "use strict";
  const seconds = Number(document.getElementById("main").dataset.reloadSeconds);
  const isTyping = () => document.activeElement?.tagName === "INPUT";
  setInterval(() => { if (!document.hidden && !isTyping()) location.reload(); }, 1000 * seconds);
})();
