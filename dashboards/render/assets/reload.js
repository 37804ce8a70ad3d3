// Loads the page anew every so often while somebody looks at it and types nothing; the place in it stays.
(() => {
  "use strict";
  const seconds = Number(document.getElementById("main").dataset.reloadSeconds);
  const isTyping = () => document.activeElement?.tagName === "INPUT";
  setInterval(() => { if (!document.hidden && !isTyping()) location.reload(); }, 1000 * seconds);
})();
