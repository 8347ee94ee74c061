// Starts the page: what its first view reads is asked for at once, while the code that draws it is still on its way.
import { begin } from "./data/client";
import { firstAsked, parse } from "./route";
import "./style/base.css";
import "./style/views.css";
import "./style/trajectory.css";
import "./style/charts.css";
import { applyTheme } from "./ui/theme";

applyTheme();
for (const path of ["site.json", ...firstAsked(location.hash)]) begin(path);
void Promise.all([import("./start"), styled()]).then(([{ start }]) => start());
const [first, run, view] = parse(location.hash).path;
if (first === "runs" && run && !view) import("./pages/overview").catch(() => {}); // told where it is drawn

/** Ends when the document is parsed and its style sheets have come, so that what is drawn has its sizes. This file does not wait for them. */
async function styled(): Promise<void> {
  if (document.readyState === "loading") await new Promise((done) => document.addEventListener("DOMContentLoaded", done, { once: true }));
  for (const sheet of document.querySelectorAll<HTMLLinkElement>("link[rel=stylesheet]")) {
    if (sheet.sheet) continue;
    await new Promise((done) => {
      sheet.addEventListener("load", done, { once: true });
      sheet.addEventListener("error", done, { once: true }); // a page without colours is read all the same
    });
  }
}
