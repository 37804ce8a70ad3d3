// The theme: the system's, or the one chosen here; told to drawings by the event "theme".
(() => {
  "use strict";
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const kept = () => { try { return localStorage.getItem("dpgcl-theme"); } catch { return null; } };
  const keep = (name) => { try { localStorage.setItem("dpgcl-theme", name); } catch { /* a sandbox has none */ } };
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  if (kept() === "dark" || kept() === "light") root.dataset.theme = kept();

  const show = () => {
    const button = document.getElementById("theme");
    if (button) button.textContent = isDark() ? "Light theme" : "Dark theme";
    dispatchEvent(new Event("theme"));
  };
  addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    if (button) {
      button.hidden = false;
      button.addEventListener("click", () => {
        root.dataset.theme = isDark() ? "light" : "dark";
        keep(root.dataset.theme);
        show();
      });
    }
    show();
  });
  system.addEventListener("change", show);
  window.dashboard = { isDark };
})();
