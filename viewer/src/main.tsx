// Starts the page.
import { render } from "preact";
import { App } from "./app";
import { begin } from "./data/client";
import { firstAsked } from "./route";
import "./style/base.css";
import "./style/views.css";
import "./style/trajectory.css";
import "./style/charts.css";
import { listen } from "./ui/keys";
import { applyTheme } from "./ui/theme";

applyTheme();
for (const path of ["site.json", ...firstAsked(location.hash)]) begin(path);
listen();
render(<App />, document.getElementById("app")!);
