// Keyboard: views register what a key does; keys typed into fields are theirs. "g t" is two keys one after the other.
import { useLayoutEffect, useRef } from "preact/hooks";

export type Keys = Record<string, () => void>;

const layers: { current: Keys }[] = [];
const SWITCH = "relax-keys";
let pending = "";
let pendingUntil = 0;

export function keysOn(): boolean {
  return localStorage.getItem(SWITCH) !== "off";
}

export function switchKeys(on: boolean): void {
  localStorage.setItem(SWITCH, on ? "on" : "off");
}

/** Registers keys while the component is shown, from before it is painted; later components come first. */
export function useKeys(keys: Keys): void {
  const layer = useRef(keys);
  layer.current = keys;
  useLayoutEffect(() => {
    layers.push(layer);
    return () => void layers.splice(layers.indexOf(layer), 1);
  }, []);
}

function typing(target: EventTarget | null): boolean {
  return target instanceof HTMLElement && target.closest("input, textarea, select, [contenteditable], audio, video, [data-keys=own]") !== null;
}

function find(name: string): (() => void) | undefined {
  for (let at = layers.length - 1; at >= 0; at--) {
    const action = layers[at]?.current[name];
    if (action) return action;
  }
  return undefined;
}

export function listen(): void {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (document.querySelector("dialog[open]")) return;
    if (event.key === "Escape" && event.target instanceof HTMLElement && typing(event.target)) return event.target.blur();
    if (typing(event.target)) return;
    if (event.key.length === 1 && !keysOn()) return;
    const onControl = event.target instanceof HTMLElement && event.target.closest("a, button, summary") !== null;
    if (onControl && (event.key === "Enter" || event.key === " ")) return;
    const chord = performance.now() < pendingUntil ? `${pending} ${event.key}` : event.key;
    pendingUntil = 0;
    const action = find(chord) ?? find(event.key);
    if (action) {
      event.preventDefault();
      action();
    } else if (event.key === "g") {
      pending = "g";
      pendingUntil = performance.now() + 1500;
    }
  });
}

/** Puts the cursor into the view's search field. */
export function focusSearch(): void {
  const field = document.querySelector<HTMLInputElement>("main input[type=search]");
  field?.focus();
  field?.select();
}

export const HELP: [string, [string, string][]][] = [
  [
    "Everywhere",
    [
      ["?", "this help"],
      ["/", "search"],
      ["Esc", "leave a field; back to the list"],
      ["g r", "runs"],
      ["g o", "overview of the run"],
      ["g t", "trajectories of the run"],
      ["g m", "media of the run"],
      ["d", "dark, light or as the system"],
    ],
  ],
  [
    "Trajectories",
    [
      ["j  k", "next, previous row"],
      ["Enter", "open the row"],
      ["w  b", "worst first, best first"],
    ],
  ],
  [
    "One trajectory",
    [
      ["j  k", "next, previous of the list"],
      ["u", "its group, side by side"],
      ["p", "play or pause the first sound or film"],
      ["←  →", "tokens, when the strip has the focus"],
    ],
  ],
];
