// Draws the page.
import { render } from "preact";
import { App } from "./app";
import { listen } from "./ui/keys";

export function start(): void {
  listen();
  render(<App />, document.getElementById("app")!);
}
