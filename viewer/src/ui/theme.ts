// Dark, light, or as the system has it; charts ask here for their colours.
const NAME = "relax-theme";
export type Theme = "system" | "light" | "dark";
const watchers = new Set<() => void>();

export function theme(): Theme {
  const kept = localStorage.getItem(NAME);
  return kept === "light" || kept === "dark" ? kept : "system";
}

export function applyTheme(): void {
  const wanted = theme();
  const dark = wanted === "dark" || (wanted === "system" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  for (const watcher of watchers) watcher();
}

export function nextTheme(): void {
  const order: Theme[] = ["system", "light", "dark"];
  localStorage.setItem(NAME, order[(order.indexOf(theme()) + 1) % order.length]!);
  applyTheme();
}

export function watchTheme(watcher: () => void): () => void {
  watchers.add(watcher);
  return () => void watchers.delete(watcher);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", applyTheme);

/** A colour of the style sheet, by the name of its custom property without dashes. */
export function colour(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
