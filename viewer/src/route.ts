// The address is the state: #/path/segments?name=value, so that every view can be linked to.

export interface Route {
  path: string[];
  query: URLSearchParams;
}

export function parse(hash: string): Route {
  const [path = "", query = ""] = splitOnce(hash.replace(/^#\/?/, ""), "?");
  return { path: path.split("/").filter(Boolean).map(decode), query: new URLSearchParams(query) };
}

/** What the view at an address asks first, and asks without parameters: it can be on its way before the view is there. */
export function firstAsked(hash: string): string[] {
  const [first, run, view, item] = parse(hash).path;
  if (!first) return ["runs.json"];
  if (first !== "runs" || !run) return [];
  const at = `runs/${encodeURIComponent(run)}`;
  if (!view) return [`${at}/run.json`];
  return item && (view === "trajectories" || view === "groups") ? [`${at}/${view}/${encodeURIComponent(item)}.json`] : [];
}

function splitOnce(text: string, by: string): [string, string] {
  const at = text.indexOf(by);
  return at < 0 ? [text, ""] : [text.slice(0, at), text.slice(at + 1)];
}

function decode(segment: string): string {
  try {
    return decodeURIComponent(segment);
  } catch {
    return segment;
  }
}

export function link(path: (string | number)[], query?: URLSearchParams | Record<string, string | number | null | undefined>): string {
  const asked = query instanceof URLSearchParams ? query.toString() : new URLSearchParams(known(query ?? {})).toString();
  return `#/${path.map((segment) => encodeURIComponent(segment)).join("/")}${asked ? `?${asked}` : ""}`;
}

function known(query: Record<string, string | number | null | undefined>): [string, string][] {
  return Object.entries(query).flatMap(([name, value]) => (value === null || value === undefined || value === "" ? [] : [[name, String(value)] as [string, string]]));
}

export function go(path: (string | number)[], query?: URLSearchParams): void {
  location.hash = link(path, query);
}

/** Changes parameters of the present view without a new entry in the browser's history; empty values leave the address. */
export function setQuery(changes: Record<string, string | number | null>): void {
  const route = parse(location.hash);
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === "") route.query.delete(name);
    else route.query.set(name, String(value));
  }
  history.replaceState(null, "", link(route.path, route.query));
  window.dispatchEvent(new HashChangeEvent("hashchange"));
}
