// Starts the page.
import { render } from "preact";
import { App } from "./app";
import "./style/base.css";
import "./style/views.css";
import "./style/trajectory.css";
import "./style/charts.css";
import { listen } from "./ui/keys";
import { applyTheme } from "./ui/theme";

applyTheme();
listen();
render(<App />, document.getElementById("app")!);
